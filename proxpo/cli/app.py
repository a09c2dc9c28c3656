"""Commands and their options. Each imports its code when it runs: `--help` loads no torch."""

from typing import Annotated, Any

import typer

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Proximal policy-optimization methods for RL post-training of language models.",
    epilog="To see a model learn in two minutes: proxpo train quickstart",
)

FLAG = ""  # a flag takes no value: typer would show <bool>
AsJson = Annotated[bool, typer.Option("--json", metavar=FLAG, help="Print JSON and nothing else.")]
Model = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="tiny, smollm2, a folder, or a Hugging Face id."),
]
Task = Annotated[
    str | None,
    typer.Option(
        "--task", metavar="TASK", help="arithmetic, gsm8k, reasoning-gym:NAME or a .jsonl file."
    ),
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Seed of the run.")]
Resume = Annotated[bool, typer.Option("--resume", metavar=FLAG, help="Continue the run in DIR.")]


def set_option(help: str) -> Any:
    """The option --set, which may be repeated."""
    return typer.Option("--set", metavar="KEY=VALUE", help=f"{help} May be repeated.")


def _version(asked: bool) -> bool:
    if asked:
        import proxpo

        typer.echo(f"proxpo {proxpo.__version__}")
        raise typer.Exit()
    return asked


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar=FLAG, callback=_version, is_eager=True, help="Show the version."
        ),
    ] = False,
) -> None:
    pass


@app.command("inspect")
def inspect_command(
    methods: Annotated[
        list[str],
        typer.Argument(metavar="METHOD", help="Names (see proxpo methods) or YAML files."),
    ],
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="A .json or .safetensors batch, or 'sample', which is included."
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="A run with saved batches (log.batch_every), and --step."),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", help="Step of --run whose batch is taken; default: the last."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        set_option(
            "An option or a stage, e.g. clip_high=0.28, ratio=kalman, ratio.q=1e-6, "
            "weights+=tis; p3o:ess_scope=microbatch is for p3o alone."
        ),
    ] = None,
    as_json: AsJson = False,
    html: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write a page with a heat map of every token's weight."),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(min=0, max=2**63 - 1, metavar="N", help="Seed of stages that draw at random."),
    ] = 0,
) -> None:
    """Show loss, gradient on every token, advantages and metrics of methods on one batch."""
    from proxpo.cli.inspecting import chosen_batch, inspect_methods

    path, source = chosen_batch(batch, run, step)
    inspect_methods(
        methods, path, settings or [], source=source, as_json=as_json, html=html, seed=seed
    )


@app.command("methods")
def methods_command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One method, in full.")] = None,
    setting: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="SETTING,...",
            help="Methods for a setting, with the measured reason: stale,long for example.",
        ),
    ] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(
            "--stage",
            metavar="STAGE",
            help="Only methods with this stage: a kind (gradient), a name (ppo_clip) or both "
            "(ratio=kalman). May be repeated.",
        ),
    ] = None,
    needs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD",
            help="Only methods that read this batch field (ref_logp); no-FIELD: that do not. May "
            "be repeated.",
        ),
    ] = None,
    bibtex: Annotated[
        bool,
        typer.Option(
            "--bibtex", metavar=FLAG, help="Print the paper of NAME, or of all, as BibTeX."
        ),
    ] = False,
    as_json: AsJson = False,
    picture: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Draw the weights of the method NAME into an SVG file."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of the method in the picture."),
    ] = None,
) -> None:
    """List all methods; with a name: its formula, departures, defaults, stages and source."""
    from proxpo.cli.catalogue import show_bibtex, show_method, show_methods, write_picture
    from proxpo.cli.choosing import show_choice
    from proxpo.errors import ProxpoError

    if setting is not None:
        if name is not None or stage or needs or bibtex or picture or settings:
            raise ProxpoError("--for stands alone, or with --json: it chooses among all methods")
        show_choice(setting, as_json=as_json)
    elif picture is not None and name is not None:
        if stage or needs or bibtex or as_json:
            raise ProxpoError("--picture stands with a NAME and --set alone")
        write_picture(name, settings or [], picture)
    elif picture is not None or settings:
        raise ProxpoError("--picture FILE needs the NAME of a method, and --set needs both")
    elif bibtex:
        if as_json:
            raise ProxpoError("--bibtex and --json exclude each other")
        show_bibtex(name, stages=stage or (), needs=needs or ())
    elif name is None:
        show_methods(stages=stage or (), needs=needs or (), as_json=as_json)
    else:
        show_method(name, stages=stage or (), needs=needs or (), as_json=as_json)


@app.command("train")
def train_command(
    config: Annotated[
        str | None,
        typer.Argument(metavar="CONFIG", help="A YAML file, or the name of a preset: quickstart."),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option("--method", metavar="METHOD", help="A method (see proxpo methods)."),
    ] = None,
    model: Model = None,
    task: Task = None,
    settings: Annotated[
        list[str] | None, set_option("Any setting, e.g. lr=1e-5, steps=50, ratio=kalman.")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder of the run; default: runs/METHOD-TASK-seedN."),
    ] = None,
    seed: Seed = None,
    resume: Resume = False,
    list_presets: Annotated[
        bool, typer.Option("--presets", metavar=FLAG, help="List the presets that CONFIG may name.")
    ] = False,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", metavar=FLAG, help="List every setting of the run with its meaning."
        ),
    ] = False,
) -> None:
    """Train a model by reinforcement; writes metrics, checkpoints, curves and a report."""
    from proxpo.cli.training import explain_settings, run_training, show_presets

    if list_presets:
        show_presets()
        return
    given = {"method": method, "model": model, "task": task, "out": out, "seed": seed}
    overrides = {name: value for name, value in given.items() if value is not None}
    if explain:
        explain_settings(config, settings or [], overrides)
        return
    run_training(config, settings or [], overrides, resume=resume)


@app.command("warmup")
def warmup_command(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            help="A task with worked solutions: gsm8k, column-sums, arithmetic, "
            "reasoning-gym:chain_sum, :gcd, :letter_counting, a .jsonl file.",
        ),
    ],
    out: Annotated[str, typer.Option(metavar="DIR", help="Folder of the model.")],
    model: Model = None,
    settings: Annotated[
        list[str] | None,
        set_option(
            "problems, epochs, batch, lr, weight_decay, grad_clip, optimizer, max_prompt, "
            "max_tokens, save_every, device, dtype, task.options.NAME."
        ),
    ] = None,
    seed: Seed = None,
) -> None:
    """Train on the worked solutions of a task; writes a model to start training from.

    Can be stopped at any time: the same command continues it.
    """
    from proxpo.cli.warming import run_warmup

    run_warmup(task, settings or [], out=out, model=model, seed=seed)


@app.command("adapt")
def adapt_command(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="rosa or latentseek.")],
    model: Model = None,
    task: Task = None,
    problems: Annotated[
        int | None,
        typer.Option(metavar="N", help="Held-out problems of a run, from the first; default: 50."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        set_option(
            "An option of the method (see proxpo methods METHOD), or max_tokens, temperature, "
            "first, device, dtype, task.options.NAME, task.reward, task.correct_above."
        ),
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Folder of the run.")] = None,
    seed: Seed = None,
    seeds: Annotated[
        int | None,
        typer.Option(metavar="K", help="Runs of seeds 0 to K-1, each on problems of its own."),
    ] = None,
    resume: Resume = False,
) -> None:
    """Adapt to one problem at a time, against resampling and plain steps with the same tokens."""
    from proxpo.cli.adapting import run_adaptation

    run_adaptation(
        method,
        settings or [],
        out=out,
        resume=resume,
        seeds=seeds,
        model=model,
        task=task,
        problems=problems,
        seed=seed,
    )


@app.command("compare")
def compare_command(
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="METHOD",
            help="Methods, with settings as in grpo:clip_low=0.4,clip_high=0.4; with --study its "
            "arms to run, or others at its settings; with --confirm its arms.",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(metavar="K", help="Seeds that are reported, 0 to K-1; default: 3.")
    ] = None,
    first_seed: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Reports seeds N to N+K-1: a finding on seeds it has not seen."
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B",
            help="Settings to choose from, on seeds of their own; the best of each method is then "
            "run on the reported seeds. May be repeated: every combination.",
        ),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B",
            help="Settings to report side by side, e.g. overlap=16,64; "
            "clip_low+clip_high=0.2,0.4 moves both. May be repeated: every combination.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, set_option("A setting of all runs; isopo:overlap=16 is for isopo alone.")
    ] = None,
    study: Annotated[
        str | None, typer.Option(metavar="NAME", help="A study by name or file (see --studies).")
    ] = None,
    confirm: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="The comparison in DIR again, each arm as tuned there, on seeds it has not seen.",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--config", metavar="CONFIG", help="Config of all runs: a YAML file or a preset."
        ),
    ] = None,
    model: Model = None,
    task: Task = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Runs at a time; default: cores, or GPUs."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Threads of a run; default: cores / jobs."),
    ] = None,
    tune_seeds: Annotated[
        int | None, typer.Option(metavar="K", help="Seeds a sweep is judged on; default: 2.")
    ] = None,
    tune_best: Annotated[
        int | None,
        typer.Option(metavar="N", help="Settings that go on after its first seed; default: all."),
    ] = None,
    on: Annotated[
        str, typer.Option(metavar="local|ray", help="Where the runs are made.")
    ] = "local",
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder of the comparison; an existing one is continued."),
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", metavar=FLAG, help="Repeat the runs that failed.")
    ] = False,
    list_them: Annotated[
        bool,
        typer.Option(
            "--studies", metavar=FLAG, help="List the shipped studies and their questions."
        ),
    ] = False,
    search: Annotated[
        bool,
        typer.Option(
            "--search",
            metavar=FLAG,
            help="Search compositions of stages, against the methods named or else eight of them; "
            "settings of --sweep are part of the search.",
        ),
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="RUNS|MIN", help="Of a search without its confirmation: 240 or 90min."
        ),
    ] = None,
    unseen: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Of a search: settings of the task that only confirms, e.g. task=gsm8k or "
            "task.options.digits=2. May be repeated.",
        ),
    ] = None,
    proposals: Annotated[
        str | None,
        typer.Option(
            metavar="tpe|random", help="Of a search: how candidates are drawn; default: tpe."
        ),
    ] = None,
    candidates: Annotated[
        int | None,
        typer.Option(metavar="N", help="Of a search: candidates of a bracket; default: 16."),
    ] = None,
    finalists: Annotated[
        int | None,
        typer.Option(metavar="N", help="Of a search: candidates to confirm; default: 3."),
    ] = None,
) -> None:
    """Compare methods on equal terms: same model, prompts, budget and seeds; writes a report.

    Can be stopped or killed at any time: the same command continues it.
    """
    from proxpo.cli.comparing import CompareOptions, SearchOptions, list_studies, run_comparison

    if list_them:
        list_studies()
        return
    searched = SearchOptions(
        budget=budget,
        unseen=unseen or (),
        proposals=proposals,
        candidates=candidates,
        finalists=finalists,
    )
    options = CompareOptions(
        methods=methods or (),
        study=study,
        confirm=confirm,
        config=config,
        model=model,
        task=task,
        settings=settings or (),
        seeds=seeds,
        first_seed=first_seed,
        tune_seeds=tune_seeds,
        tune_best=tune_best,
        sweep=sweep or (),
        vary=vary or (),
        jobs=jobs,
        threads=threads,
        on=on,
        out=out,
        retry_failed=retry_failed,
    )
    if search:
        from proxpo.cli.searching import run_search_command

        raise typer.Exit(run_search_command(options, searched))
    searched.refuse_unused()
    raise typer.Exit(run_comparison(options))


@app.command("report")
def report_command(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            help="Folders of a comparison or of runs, TRL's trainer_state.json, verl's .jsonl log; "
            "ARM=RUN names its arm.",
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Where to write; a comparison's own folder, or report/."),
    ] = None,
) -> None:
    """Redraw a comparison, or compare runs of proxpo, TRL and verl, from their files."""
    from proxpo.cli.reporting import write_reports

    write_reports(runs, out)


@app.command("sparsity")
def sparsity_command(
    before: Annotated[
        str, typer.Argument(metavar="BEFORE", help="A .safetensors file or a folder of them.")
    ],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="The same weights, trained.")],
    other: Annotated[
        str | None,
        typer.Option("--against", metavar="OTHER", help="A second run from BEFORE: the overlap."),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            help="bfloat16, float16, float32, float64, or stored: the dtype of the comparison.",
        ),
    ] = "bfloat16",
    tol: Annotated[
        float, typer.Option(metavar="T", help="Changes up to this size do not count.")
    ] = 1e-5,
    only: Annotated[
        str, typer.Option(metavar="REGEX", help="Only weights whose name contains this.")
    ] = "",
    rank: Annotated[
        bool, typer.Option("--rank", metavar=FLAG, help="Also the rank of each change.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure the share of weights that training changed, by layer, in a stated dtype."""
    from proxpo.cli.sparsity import show_sparsity

    show_sparsity(
        before, after, other=other, dtype=dtype, tol=tol, only=only, rank=rank, as_json=as_json
    )


@app.command("doctor")
def doctor_command(
    as_json: AsJson = False,
) -> None:
    """Try every host on this machine; what is missing gets its pip line."""
    from proxpo.cli.doctoring import run_doctor

    raise typer.Exit(run_doctor(as_json=as_json))


__all__ = ["app"]
