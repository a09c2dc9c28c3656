"""Warm starts: the loss is the cross entropy, a stopped run goes on, solutions are right."""

from itertools import islice

import pytest
import torch

from proxpo.errors import ProxpoError
from proxpo.models import load_policy
from proxpo.rewards.answers import final_answer
from proxpo.runs.stop import StopRequest
from proxpo.train import warmup
from proxpo.train.observer import Observer
from proxpo.train.tasks import make_task
from proxpo.train.tasks.column_sums import column_addition

SETS = ("problems=24", "batch=8", "lr=1e-3", "device=cpu")


def settings(*sets: str, task: str = "arithmetic:mixed"):
    return warmup.load_warmup([*SETS, *sets], task=task)


@pytest.mark.parametrize(
    ("sets", "reason"),
    [
        ("seed=-1", "seed is at least 0, got -1"),
        ("grad_clip=0", "grad_clip is above 0, or none for no limit, got 0"),
        ("task=gsm8k", "task arithmetic:mixed and --set task=gsm8k contradict each other"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(sets, reason):
    with pytest.raises(ProxpoError, match=reason):
        settings(sets)


def test_a_warm_start_does_not_go_on_with_another_file(tmp_path):
    """Nor does one that is finished answer for it. A reward is not asked for."""
    problems, request = tmp_path / "own.jsonl", StopRequest(requested=True, by="SIGTERM")
    problems.write_text(12 * '{"prompt": "1+1=", "answer": "2", "solution": "2"}\n')
    chosen = settings("batch=4", "task.options.solution_field=solution", task=str(problems))
    warmup.WarmupRun(chosen, tmp_path / "cut", Observer()).make(request)
    warmup.warm_up(chosen, tmp_path / "whole")
    problems.write_text(12 * '{"prompt": "1+2=", "answer": "3", "solution": "3"}\n')
    for folder in ("cut", "whole"):
        with pytest.raises(ProxpoError, match=r"own.jsonl has changed since the warm start in"):
            warmup.warm_up(chosen, tmp_path / folder)


def test_the_loss_is_the_cross_entropy_of_the_solutions():
    chosen = settings("dtype=float64")
    policy = load_policy("tiny", dtype="float64", device="cpu")
    task = make_task(chosen.task)
    rows = warmup.encoded(task, policy, warmup.solved(task, 6), chosen)
    learner = warmup.make_learner(chosen, policy)
    loss = warmup.gradient(learner, warmup.as_experience(rows, policy))
    ours = [p.grad.clone() for p in policy.model.parameters()]
    policy.model.zero_grad()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for prompt, response in rows:
        assert response[-1] == policy.tokenizer.eos_token_id
        logits = policy.model(torch.tensor([[*prompt, *response]])).logits[0]
        before = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
        total = total - before.gather(1, torch.tensor(response)[:, None]).sum()
        count += len(response)
    (total / count).backward()
    assert loss == pytest.approx(float(total.detach()) / count, rel=1e-7)
    for p, gradient in zip(policy.model.parameters(), ours):
        torch.testing.assert_close(gradient, p.grad, rtol=1e-5, atol=1e-6)  # norms are float32


def test_a_stopped_warm_start_goes_on_as_if_it_had_not_been(tmp_path):
    chosen, request = settings(), StopRequest()

    def stop(step, metrics):
        request.requested, request.by = step == 2, "SIGTERM"

    whole = warmup.warm_up(chosen, tmp_path / "whole")
    run = warmup.WarmupRun(chosen, tmp_path / "cut", Observer(on_step=stop))
    assert run.make(request) == {"stopped": "SIGTERM", "steps": 2}
    with pytest.raises(ProxpoError, match=r"other settings \(lr: \S+ -> 0.0001\)"):
        warmup.warm_up(settings("lr=1e-4"), tmp_path / "cut")
    rest = warmup.warm_up(chosen, tmp_path / "cut")
    assert rest == whole == warmup.warm_up(chosen, tmp_path / "cut")
    assert whole["loss_last"] < whole["loss_first"]
    assert not (tmp_path / "cut" / "checkpoints").exists()
    weights = [
        dict(load_policy(str(tmp_path / n)).model.named_parameters()) for n in ("whole", "cut")
    ]
    for name, p in weights[0].items():
        assert torch.equal(p, weights[1][name]), name


def test_settings_that_cannot_work_are_refused_in_one_line(tmp_path):
    for sets, words in {
        "epoch=3": "unknown setting of warmup 'epoch'; did you mean 'epochs'?",
        "batch=0": "warmup: batch is at least 1, got 0",
    }.items():
        with pytest.raises(ProxpoError, match=words.replace("?", r"\?")):
            settings(sets)
    with pytest.raises(ProxpoError, match="problem 0 has no worked solution"):
        warmup.warm_up(settings(task="calculator"), tmp_path / "none")
    file = tmp_path / "plain.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 12)
    with pytest.raises(ProxpoError, match=r"--set task\.options\.solution_field=NAME"):
        warmup.warm_up(settings(task=str(file)), tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "file", ["model.safetensors", "plan.yaml", "config.yaml", "checkpoints/step-1/info.json"]
)
def test_a_folder_with_something_else_stays_as_it_is(file, tmp_path):
    (tmp_path / "checkpoints/step-1").mkdir(parents=True)
    (tmp_path / file).write_text('{"config": {}}')
    with pytest.raises(ProxpoError, match="something other than a warm start: choose another"):
        warmup.warm_up(settings(), tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / file]
    (tmp_path / "model").mkdir()
    with pytest.raises(ProxpoError, match="is the folder of the model itself"):
        warmup.warm_up(settings(f"model={tmp_path}/model"), tmp_path / "model")


def test_a_warm_start_that_was_killed_early_begins_again(tmp_path):
    (tmp_path / ".lock").write_text("process 1 on a\n")
    (tmp_path / "checkpoints/.unfinished-1").mkdir(parents=True)
    assert warmup.warm_up(settings(), tmp_path)["steps"]


def test_a_warm_start_whose_model_was_written_in_part_writes_it_again(tmp_path, monkeypatch):
    """A full disk while the tokenizer is written; a kill there leaves the same files."""

    def full(*_, **__):
        raise Exception("No space left on device (os error 28)")  # as tokenizers raises it

    chosen, out, steps = settings("save_every=0"), tmp_path / "warm", []
    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedTokenizerFast._save_pretrained", full)
        with pytest.raises(OSError, match="No space left on device") as error:
            warmup.warm_up(chosen, out)
    assert error.value.filename == str(out)
    assert (out / "model.safetensors").exists()
    warmup.warm_up(chosen, out, Observer(on_step=lambda step, metrics: steps.append(step)))
    assert not steps
    assert load_policy(str(out)).name == str(out)


def test_column_sums_carry():
    assert column_addition([97, 5, 801]).splitlines() == [
        "7 + 5 + 1 = 13, write 3, carry 1",
        "9 + 0 + 1 = 10, write 0, carry 1",
        "8 + 1 = 9, write 9, carry 0",
        "#### 903",
    ]


def test_worked_solutions_earn_the_reward(tmp_path):
    gsm8k = '{"question": "2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\\n#### 5"}\n'
    (tmp_path / "problems.jsonl").write_text(gsm8k + gsm8k.replace("2 + 3?", "How much is 2 + 3?"))
    for name in ("column-sums", "column-sums:hard", f"gsm8k:{tmp_path / 'problems.jsonl'}"):
        task = make_task(name)
        for problem in [*islice(task.train, 50), *task.test[:50]]:
            assert final_answer(problem.solution, problem.answer)["acc"], problem
            assert "<<" not in problem.solution
        assert task.overlap() == 0


@pytest.mark.parametrize("name", ["chain_sum", "gcd", "letter_counting"])
def test_worked_solutions_of_reasoning_gym(name):
    from proxpo.rewards.gym import score

    for problem in islice(make_task(f"reasoning-gym:{name}").train, 20):
        assert score(problem.solution, problem.extra, name=name, config={})["score"] == 1.0
