"""What becomes of a batch whose update fails: kept, then skipped or the end of the run."""

from types import SimpleNamespace

import pytest
import torch

from megatron_opo.batch import Prompt
from megatron_opo.dynamic_sampling import Drawn
from megatron_opo.observe.run_log import RunLog
from megatron_opo.replay import read_batch
from tests.actor_cases import make_rollout, open_actor, open_writer, sampled
from tests.models import tiny_qwen3
from tests.ranks import run_ranks


def failing_updates(model: str, run_dir: str, overrides: list[str]):
    """On each rank: the error of a batch that servers and actor disagree on; what is said of
    batches without a finite loss until the run ends, each followed by what the versions are."""
    from megatron_opo.errors import OpoError
    from megatron_opo.update import take_step

    bounds = ["algorithm.max_logprob_gap=0.01", "algorithm.mean_logprob_gap=0.01"]
    actor = open_actor(model, run_dir, ["actor.data_parallel=2", *bounds, *overrides])
    here, desk = actor.driver.is_here, None
    if here:
        recipe = actor.recipe
        log = RunLog(recipe.run_path, recipe_text="", versions={}, total_steps=9, quiet=True)
        drawn = Drawn([], [], 0)
        desk = SimpleNamespace(recipe=recipe, log=log, drawn=drawn, skipped_updates=0)
        desk.rollout = SimpleNamespace(differing_weights=lambda: None)

    def attempt(batch) -> tuple[str, dict, int]:
        try:
            return "", take_step(batch, actor, desk, actor.driver), actor.version
        except OpoError as error:
            return f"{type(error).__name__}: {error}", {}, actor.version

    answers = [attempt(make_rollout(actor.hf_config["vocab_size"]) if here else None)]
    answers.append(attempt(sampled(actor)))
    norm = dict(actor.modules[0].named_parameters())["decoder.final_layernorm.weight"]
    hook = norm.register_hook(lambda gradient: gradient * torch.nan)
    answers += [attempt(sampled(actor)) for _ in range(2)]
    hook.remove()
    answers.append(attempt(sampled(actor)))
    norm.register_hook(lambda gradient: gradient * torch.nan)
    answers += [attempt(sampled(actor)) for _ in range(4)]
    return answers


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_qwen3(tmp_path_factory.mktemp("model") / "model"))


def test_failed_batches_are_kept_and_skipped_up_to_three_in_a_row(model, tmp_path):
    run = tmp_path / "run"
    first, other = run_ranks(2, failing_updates, model, str(run), ["train.on_nonfinite=skip"])
    for answers in (first, other):
        assert [version for _, _, version in answers] == [0, 1, 1, 1, 2, 2, 2, 2, 2]
    kept = {path.name: read_batch(path).version for path in (run / "batches").iterdir()}
    assert kept == {"step_1.failed.safetensors": 0} | {
        f"step_{step}.failed{number}.safetensors": step - 1
        for step, count in ((2, 2), (3, 4))
        for number in ["", "_2", "_3", "_4"][:count]
    }
    assert [i for i, (error, _, _) in enumerate(first) if error] == [0, 8]
    assert first[0][0].startswith("OnPolicyError: the actor and the rollout servers disagree")
    assert f"--replay {run}/batches/step_1.failed.safetensors" in first[0][0]
    assert other[0][0].startswith("DriverFailed: rank 0 failed: OnPolicyError")
    assert first[8][0].startswith("NonFiniteError: step 3: the gradient is not finite")
    assert "nothing was applied, after 3 that were skipped.\nIts batch is kept" in first[8][0]
    assert other[8][0].startswith("DriverFailed: rank 0 failed: NonFiniteError")
    assert [first[i][1]["actor/skipped_updates"] for i in (1, 4)] == [0, 2]
    log = (run / "run.log").read_text()
    assert log.count("Skipped, ") == 5
    assert "Skipped, 3 of at most 3 in a row: version 2 goes on" in log


def test_by_default_the_run_ends_and_says_so_even_where_the_batch_cannot_be_kept(model, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "batches").write_text("in the way")
    first, other = run_ranks(2, failing_updates, model, str(run), [])
    assert [i for i, (error, _, _) in enumerate(first) if error] == [0, 2, 3, 5, 6, 7, 8]
    assert first[0][0].startswith("OnPolicyError: the actor and the rollout servers disagree")
    assert first[2][0].startswith("NonFiniteError: step 2: the gradient is not finite")
    assert all(error.startswith("DriverFailed: ") for error, _, _ in other if error)
    for i in (0, 2):
        assert "the batch cannot be kept: " in first[i][0]


def ended_by_failures(model: str, run_dir: str):
    """Checkpoints and cursors after an update without a finite gradient ends the run, and after one
    with weights that are not finite; and before that, the errors."""
    from megatron_opo.errors import OpoError
    from megatron_opo.prompts import PromptCursor, PromptSet
    from megatron_opo.runs import complete_checkpoints, read_checkpoint
    from megatron_opo.train import take_step_or_end

    actor = open_actor(model, run_dir, ["actor.data_parallel=2"])
    here, desk = actor.driver.is_here, None
    if here:
        recipe = actor.recipe
        log = RunLog(recipe.run_path, recipe_text="", versions={}, total_steps=9, quiet=True)
        prompts = tuple(Prompt(str(i), (3,), "", "d", None) for i in range(9))
        cursor = PromptCursor(PromptSet("train", prompts, 9, 0, 0, 1), shuffle=True, seed=3)
        desk = SimpleNamespace(
            recipe=recipe, log=log, drawn=Drawn([], [], 0), skipped_updates=0, cursor=cursor
        )
        desk.state = lambda: {"cursor": cursor.state()}
        desk.return_prompts = lambda: cursor.restore(desk.drawn_from)
    writer = open_writer(actor)
    norm = dict(actor.modules[0].named_parameters())["decoder.final_layernorm.weight"]

    def attempt() -> str:
        batch = sampled(actor)
        if desk:
            desk.drawn_from = cursor.state()
            cursor.next(2)
        try:
            take_step_or_end(batch, actor, desk, actor.driver, writer, None)
        except OpoError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            writer.wait()
        return ""

    attempt()
    hook = norm.register_hook(lambda gradient: gradient * torch.nan)
    said = attempt()
    hook.remove()
    attempt()

    def break_weight(*_):
        norm.data[3] = torch.nan

    norm.register_post_accumulate_grad_hook(break_weight)
    lost = attempt()
    found = [read_checkpoint(path) for path in complete_checkpoints(actor.recipe.run_path)]
    return said, lost, [(each.version, each.cursor["position"]) for each in found]


def test_the_version_that_sampled_a_failed_batch_is_saved_if_it_is_whole(model, tmp_path):
    (first, lost, saved), (other, _, _) = run_ranks(
        2, ended_by_failures, model, str(tmp_path / "run")
    )
    assert first.startswith("NonFiniteError: step 2: the gradient is not finite")
    assert other.startswith("DriverFailed: rank 0 failed: NonFiniteError")
    assert lost.startswith("TrainingError: step 3 made weights that are not finite")
    assert saved == [(1, 2)], "and the prompts of the failed batch come again"
