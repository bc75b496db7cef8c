"""How much variance of the policy gradient each baseline removes, and what bias it adds.

    python tools/make_tiny_model.py --out models/tiny_arithmetic
    OMP_NUM_THREADS=1 python benchmarks/variance.py        # about 5 minutes on one core
    OMP_NUM_THREADS=1 python benchmarks/variance.py --quick --out /some/directory

On the quickstart's model, at its start and after some steps of training, each held-out question is
answered many times, and the gradient of every different answer is computed exactly. An estimator
maps the rewards of a group of G answers to h = sum_i c_i g_i, where g_i is the gradient of
log p(answer i | question). Any G different answers of the sample are a group, so many random groups
of one sample give unbiased estimates (U-statistics) of

- E|h|^2, from groups with themselves,
- |E h|^2 and the like, from pairs of groups that share no answer,

and so of the variance E|h|^2 - |E h|^2, the trace of the covariance. The bias of an estimator is
the mean of its difference, on the same groups, to an unbiased one: its leave-one-out form, or the
optimal constant baseline, which is taken from a second, independent sample. Intervals are 95 %
bootstrap intervals over questions.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from variance_moments import (
    COMPARED,
    COUNTERPARTS,
    MAIN_SIZE,
    Answers,
    Effort,
    Stage,
    group_moments,
)
from variance_policy import (
    Ids,
    Policy,
    Question,
    response_energies,
    sample,
    sequence_gradients,
    train,
)
from variance_report import write_figure, write_table

from megatron_opo.recipe_file import load_recipe

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "quickstart_cpu.yaml"
FULL = Effort(24, 256, 64, (4, 8, 16), (10, 20), 2000)
QUICK = Effort(4, 48, 8, (4, 8), (2,), 200)


def task_rewards(policy: Policy, question: Question, responses: list[Ids]) -> torch.Tensor:
    """[tasks, d] in the order of TASKS."""
    texts = [policy.text(response) for response in responses]
    rewards = [
        [policy.reward(question, response) for response in responses],
        [float("=" in text) for text in texts],
        [float(text[-1:] in set("02468")) for text in texts],
    ]
    return torch.tensor(rewards, dtype=torch.float64)


def gather_answers(
    policy: Policy, question: Question, responses: list[Ids]
) -> tuple[list[Answers], torch.Tensor]:
    """The first half of the responses as `Answers` of each task, the second half as its constants;
    and the gradients [d, D] of the first half's different responses."""
    half = len(responses) // 2
    different = list(dict.fromkeys(responses))  # so those of the first half come first
    number = {response: i for i, response in enumerate(different)}
    index = torch.tensor([number[response] for response in responses])
    lengths = torch.tensor([len(response) for response in different], dtype=torch.float64)
    energies = response_energies(policy, question.prompt, different)
    gradients = sequence_gradients(policy, question.prompt, different)
    squared = gradients.square().sum(1).double()
    others = index[half:]
    used = int(index[:half].max()) + 1
    gradients = gradients[:used]
    gram = (gradients @ gradients.T).double()

    def of_task(rewards: torch.Tensor) -> Answers:
        def baseline(weights: torch.Tensor) -> float:
            return ((weights * rewards)[others].sum() / weights[others].sum()).item()

        return Answers(
            index=index[:half],
            rewards=rewards[:used],
            lengths=lengths[:used],
            energies=energies[:used],
            gram=gram,
            constants={
                "optimum": baseline(squared),
                "E r": baseline(torch.ones_like(lengths)),
                "E l r / E l": baseline(lengths),
                "E W r / E W": baseline(energies),
            },
            mean_length=lengths[others].mean().item(),
        )

    tasks = task_rewards(policy, question, different)
    return [of_task(rewards) for rewards in tasks], gradients


def measure(
    name: str, policy: Policy, questions: list[Question], effort: Effort, seed: int
) -> Stage:
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    optimum = COMPARED.index("optimum")
    moments, kept, directions, tasks = [], [], [], []
    start = time.monotonic()
    for responses, question in zip(
        sample(policy, questions, 2 * effort.sample, rng), questions, strict=True
    ):
        (answers, *others), gradients = gather_answers(policy, question, responses)
        rows = []
        for size in effort.sizes:
            found, coefficients = group_moments(answers, size, effort.shuffles, generator)
            rows.append(found)
            if size == MAIN_SIZE:
                # Last is E h*, before it E d of the estimators that do not know the optimum.
                different = coefficients - coefficients[COUNTERPARTS]
                different[optimum] = coefficients[optimum]
                directions.append(different[: optimum + 1].float() @ gradients)
                more = [group_moments(o, size, effort.shuffles, generator)[0] for o in others]
                tasks.append(torch.stack([found[0], *(x[0] for x in more)]))
        moments.append(torch.stack(rows))
        kept.append(answers)
        print(
            f"  {name}: {len(kept)}/{len(questions)}, {time.monotonic() - start:.0f} s", flush=True
        )
    if all((answers.rewards == answers.rewards[0]).all() for answers in kept):
        raise SystemExit(
            f"error: at the stage `{name}`, all answers to each question have the same reward, so "
            "there is no gradient to measure; give a --model that is right now and then, such as "
            "tools/make_tiny_model.py makes with its own defaults"
        )
    stacked = torch.stack(directions, 1)  # [E, P, D]
    best = stacked[optimum].expand_as(stacked)
    cross = torch.stack([x @ y.mT for x, y in ((stacked, stacked), (stacked, best), (best, best))])
    return Stage(
        name=name,
        sizes=effort.sizes,
        moments=torch.stack(moments).numpy(),
        cross=cross.double().numpy(),
        tasks=torch.stack(tasks).numpy(),
        answers=kept,
    )


def load_questions(tokenizer, file: str, limit: int | None = None) -> list[Question]:
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()][:limit]
    return [Question(tuple(tokenizer(row["prompt"])["input_ids"]), row["answer"]) for row in rows]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny_arithmetic")
    parser.add_argument("--quick", action="store_true", help="under a minute, to see that it works")
    parser.add_argument("--out", type=Path, default=ROOT, help="where benchmarks/ and docs/ lie")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if not (arguments.model / "config.json").exists():
        raise SystemExit(
            f"error: --model {arguments.model} is not a model; make it with "
            f"python tools/make_tiny_model.py --out {arguments.model}"
        )
    if arguments.quick and arguments.out == ROOT:
        raise SystemExit("error: --quick would replace the full results; give it an --out")
    effort = QUICK if arguments.quick else FULL
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    recipe = load_recipe(RECIPE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
    # Eager attention is the one that torch.func.vmap can batch.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    policy = Policy(model, tokenizer, recipe)
    data = arguments.model / "data"
    questions = load_questions(tokenizer, data / "eval.jsonl", effort.questions)
    start = time.monotonic()
    stages = [measure("start", policy, questions, effort, arguments.seed)]
    train_questions = load_questions(tokenizer, data / "train.jsonl")
    updates = train(policy, train_questions, recipe, np.random.default_rng(arguments.seed))
    for step, reward in enumerate(updates, start=1):
        if step in effort.training_steps:
            print(f"  step {step}: mean reward {reward:.2f}", flush=True)
            name, seed = f"after {step} steps", arguments.seed + step
            stages.append(measure(name, policy, questions, effort, seed))
        if step == max(effort.training_steps):
            break
    seconds = time.monotonic() - start
    results = arguments.out / "benchmarks" / "results" / "variance.md"
    figure = arguments.out / "docs" / "images" / "variance.png"
    command = "python benchmarks/variance.py" + (" --quick" if arguments.quick else "")
    write_table(results, stages, effort, seconds, command)
    write_figure(figure, stages, effort)
    print(f"wrote {results}\nwrote {figure}")


if __name__ == "__main__":
    main()
