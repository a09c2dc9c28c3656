"""Commands and snippets of README and site: each one is run, or listed with the reason why not.

The commands of a page run in order, in this process, in a folder of their own, reduced by one rule
(`reduced`): one step on a few prompts, the model in the box in place of larger ones, two problems
in place of GSM8K. A comparison makes its whole plan, which checks every run, and the first of its
runs; a search makes its plan, and so do the comparisons of the results, whose runs were made at
full size. A block that opens with `# NAME.EXT` is that file.
"""

import re
import shlex
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from proxpo.batch_file import load_batch, save_batch
from proxpo.cli import comparing, main, searching
from proxpo.cli.app import app
from proxpo.compare.design import command
from proxpo.fields import FIELDS, BatchFields
from proxpo.models import TINY
from proxpo.train.config import load_config

ROOT = Path(__file__).parents[1]
PAGES = [
    *("README.md", "CONTRIBUTING.md", "examples/README.md", "examples/verl/README.md"),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]
PAPERS = "docs/papers.md"  # 37 long runs; their settings are tested in test_papers.py
EXTRAS = set(
    tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
)
NOT_RUN = {  # part of a line -> reason; the line is parsed
    "rollout.backend=vllm": "vLLM has an environment of its own",
    "textarena:Minesweeper": "its prompts are longer than the context of the model in the box",
    "verifiers:MODULE": "a name to fill in; verifiers:guess below it is run",
    "proxpo doctor": "tries every engine in processes of its own: tests/test_doctor.py",
    "signpo": "tests/recipes/test_registry.py",
    "rankpo": "the method of the tutorial above it",
    "--run runs/trl": "the run of the tutorial above it",
    "--run runs/verl": "a run of verl",
    "winner.yaml": "the result of a search",
    "--confirm comparisons/hot": "the result of a long study; those of the results are planned",
    "--set problems=3072": "a warm start of minutes on a CPU; howto/warmup.md has one that is run",
}
SNIPPETS_ELSEWHERE = {  # page, or text in a snippet -> reason
    "docs/tutorials/": "tests/test_site.py runs the scripts that the pages are made of",
    PAPERS: "tests/test_papers.py, without the training",
    "signpo.py": "tests/recipes/test_registry.py",
    "usual.py": "tests/recipes/test_registry.py",
    '@register("ema-kpo"': "quoted from proxpo/recipes/ema_kpo.py",
    "guess.py": "a file that a command below it reads",
    "token_group=group": "needs several ranks: tests/gradients/test_spread.py",
}
CONTINUED = "docs/isopo/diagnostics.md"  # the page's second snippet goes on from the first
PLACEHOLDER = re.compile(r"\.\.\.|\b(NAME|DIR|FILE|FOLDER|REWARD|A B)\b")
SHORT = (
    *("rollout.prompts_per_step=2", "rollout.samples_per_prompt=2"),
    *("rollout.max_prompt=2048", "rollout.max_tokens=6", "train.mini_batches=1"),
    *("train.updates_per_rollout=1", "evaluate.size=2", "evaluate.k=0", "log.batch_every=1"),
    "log.pictures=false",
)
GSM8K = '{"question": "2 + %d?", "answer": "2 + %d = %d\\n#### %d"}\n'


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    language: str
    text: str


def blocks(page: str) -> list[Block]:
    found = re.findall(r"^( *)```(\w*)\n(.*?)^ *```", (ROOT / page).read_text(), re.M | re.S)
    return [Block(page, language, text) for _, language, text in found]


def commands(page: str) -> list[str]:
    """Lines `proxpo ...` of the page's blocks and of its text, without comments."""
    shell = [b.text.replace("\\\n", "") for b in blocks(page) if b.language in ("", "sh", "bash")]
    lines = [line.partition(" #")[0] for text in shell for line in text.splitlines()]
    prose = re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text(), flags=re.M | re.S)
    lines += re.findall(r"`(proxpo [^`]+ [^`-][^`]+)`", prose)
    lines = [re.sub(r"^cd \S+ && ", "", line.strip()) for line in lines]
    lines = [line.replace("$method", "grpo").replace("$seed", "0").strip(" &") for line in lines]
    lines = [line for line in lines if line.startswith("proxpo ")]
    return [line for line in dict.fromkeys(lines) if not PLACEHOLDER.search(line)]


def run_here() -> dict[str, list[str]]:
    """page -> commands that are run; one that several pages show is run on the first of them."""
    seen: set[str] = set()
    pages: dict[str, list[str]] = {}
    for page in PAGES:
        if page == PAPERS or page.startswith("docs/methods/"):
            continue
        lines = [line for line in commands(page) if not reason(line) and line not in seen]
        seen |= set(lines)
        if lines:
            pages[page] = lines
    return pages


def reason(line: str) -> str:
    """Why the line is not run; empty if it is."""
    return next((why for part, why in NOT_RUN.items() if part in line), "")


def reduced(words: list[str], *, earlier: int) -> list[str]:
    """The arguments of a command with the smallest of each size; `earlier` runs have its folder."""
    name = words[0]
    places = {"gsm8k": "gsm8k:gsm8k.jsonl", "smollm2": "tiny"}
    words = [places.get(word, "tiny" if word.startswith("Qwen/") else word) for word in words]
    if "smollm2-arithmetic" in words:
        words += ["--model", "tiny"]
    if "--confirm" in words:  # takes the settings of the plan that it repeats
        return words
    if name in ("train", "compare"):
        sets = [*SHORT, f"train.steps={1 + earlier}"]
        return [*words, *(word for setting in sets for word in ("--set", setting))]
    if name == "adapt":
        small = {"latentseek": "iterations=1", "rosa": "turns=2"}[words[1]]
        seeds = ["--seeds", "2"] if "--seeds" in words else []
        return [*words, "--problems", "1", "--set", small, *seeds]
    if name == "inspect" and "--step" in words:
        return [*words, "--step", "1"]
    return words


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Runs `proxpo`, without the settings of SHORT that this run does not have; its output."""
    while True:
        code, (out, err) = main(words), capsys.readouterr()
        refused = re.search(r"(\S+)=\S+ has no effect", err)
        if code == 2 and refused and refused[1] in {text.partition("=")[0] for text in SHORT}:
            at = next(i for i, word in enumerate(words) if word.startswith(f"{refused[1]}="))
            words = [*words[: at - 1], *words[at + 1 :]]
            continue
        assert code == 0, f"proxpo {shlex.join(words)}: {err or out}"
        return out


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a page, with what its reader has beside the page."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / "my-checkpoint").symlink_to(TINY)
    (tmp_path / "gsm8k.jsonl").write_text("".join(GSM8K % (n, n, n + 2, n + 2) for n in (3, 4)))
    save_batch(load_batch("sample"), tmp_path / "batch.safetensors")
    return tmp_path


@pytest.fixture
def first_run_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons make their plan and its first run; searches and results end with the plan."""
    planned = request.node.callspec.params["page"].startswith("docs/results/")

    def run_plan(plan, folder, pool, **_):
        assert planned or main(command(plan, plan.runs[0], folder)) == 0
        return plan

    monkeypatch.setattr(comparing, "run_plan", run_plan)
    monkeypatch.setattr(comparing, "_report", lambda *_: 0)
    monkeypatch.setattr(searching, "run_search", lambda plan, state, *_: state)
    monkeypatch.setattr(searching, "confirmations", lambda *_: {})
    monkeypatch.setattr(searching, "write_reports", lambda *_: None)


def snippets() -> list[tuple[str, str]]:
    """(page, code) of every different snippet that is run; a repeated one is run once."""
    pages: dict[str, str] = {}
    for page in PAGES:
        codes = [block.text for block in blocks(page) if block.language == "python"]
        for code in ["\n".join(codes)] if page == CONTINUED else codes:
            if not any(part in page or part in code for part in SNIPPETS_ELSEWHERE):
                pages.setdefault(code, page)
    return [(page, code) for code, page in pages.items()]


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(("page", "code"), snippets())
def test_snippets_run_as_pasted(page, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        exec(compile(code, page, "exec"), {"__name__": "snippet"})
    finally:
        for name in re.findall(r'declare_field\(\s*"(\w+)"', code):
            del FIELDS[name]
            delattr(BatchFields, name)


def test_quoted_code_is_that_of_the_package():
    quoted = next(b.text for b in blocks("CONTRIBUTING.md") if "ema-kpo" in b.text)
    source = (ROOT / "proxpo/recipes/ema_kpo.py").read_text()
    assert re.sub(r'    """.*?"""\n', "", source, flags=re.S).endswith(quoted)


def test_commands_are_understood():
    """Options, settings, presets and methods exist in the commands that are not run."""
    presets = {path.stem for path in (ROOT / "proxpo/configs").glob("*.yaml")}
    shown = {line for page in PAGES for line in commands(page)}
    for line in sorted(shown - {line for lines in run_here().values() for line in lines}):
        _, name, *arguments = shlex.split(line)
        named = typer.main.get_command(app).commands[name]
        given = named.make_context(name, arguments).params
        if name == "train" and given["config"] in {None, *presets} and "rankpo" not in line:
            names = ("method", "model", "task", "seed")
            load_config(given["config"], given["settings"] or (), {n: given[n] for n in names})


def test_extras_targets_and_scripts_exist():
    text = "\n".join((ROOT / page).read_text() for page in PAGES)
    for listed in re.findall(r"proxpo\[([\w,-]+)\]", text):
        assert set(listed.split(",")) <= EXTRAS, f"proxpo[{listed}]"
    for target in re.findall(r"(?:`|^)make ([a-z-]+)", text, re.M):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text(), f"make {target}"
    for script, options in re.findall(r"python ((?:\w+/)+\w+\.py)([^`\n]*)", text):
        code = (ROOT / script).read_text()
        for option in re.findall(r" --([a-z-]+)", options):
            assert option in code, f"{script} --{option}"


@pytest.mark.long
@pytest.mark.usefixtures("first_run_alone")
@pytest.mark.parametrize("page", run_here())
def test_commands_run(page, folder, capsys):
    for block in blocks(page):
        named = re.match(r"# ([\w-]+\.\w+)\n", block.text)
        if named or block.language == "json":
            (folder / (named[1] if named else "problems.jsonl")).write_text(block.text)
    if page.startswith("docs/results/") and (ROOT / page).with_name("study.yaml").exists():
        (folder / "study.yaml").symlink_to((ROOT / page).with_name("study.yaml"))
    folders: list[str] = []
    for line in run_here()[page]:
        words = shlex.split(line)[1:]
        place = words[words.index("--out") + 1] if "--out" in words else ""
        run(reduced(words, earlier=folders.count(place) if place else 0), capsys)
        folders.append(place)
