"""What variance.py measured, as a table and a figure, with bootstrap intervals over questions."""

import os
import platform
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
import torch
import transformers
from variance_moments import (
    AGGREGATIONS,
    COMPARED,
    CONSTANTS,
    ESTIMATORS,
    MAIN_SIZE,
    PAIRED,
    TASKS,
    Answers,
    Effort,
    Stage,
)

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

LABELS = {
    "none": "none",
    "mean": "mean (`dr_grpo`)",
    "rloo": "leave-one-out mean (`rloo`)",
    "opo": "OPO (`opo`)",
    "opo_leave_one_out": "leave-one-out OPO (`opo_leave_one_out`)",
    "opo_energy": "energy-weighted (`opo_energy`)",
    "energy_leave_one_out": "leave-one-out energy (not in the package)",
    "optimum": "optimum, E\\|g\\|^2 r / E\\|g\\|^2",
    "E r": "E r",
    "E l r / E l": "E l r / E l",
    "E W r / E W": "E W r / E W",
}
STAGE_COLORS = ("#4477aa", "#ddaa33", "#cc6677")
TASK_COLORS = ("#4477aa", "#228833", "#aa3377")

Statistic = Callable[[np.ndarray], np.ndarray]


def bootstrap(statistic: Statistic, questions: int, resamples: int) -> np.ndarray:
    """[3, ...]: value, and the 2.5 and 97.5 percentiles of resampled questions.

    `statistic` maps weights [P] (how often each question counts) to an array.
    """
    rng = np.random.default_rng(0)
    with np.errstate(all="ignore"):  # a resample of few questions may have no signal at all
        value = statistic(np.ones(questions))
        draws = rng.multinomial(questions, np.full(questions, 1 / questions), resamples)
        found = np.stack([statistic(weights.astype(float)) for weights in draws])
        low, high = np.nanpercentile(found, (2.5, 97.5), axis=0)
    return np.stack([value, low, high])


def variances(moments: np.ndarray) -> np.ndarray:
    """[P, E, 5] -> [P, E]: the trace of the covariance of a group's gradient."""
    return moments[..., 0] - moments[..., 1]


def relative_variances(moments: np.ndarray, against: str = "none") -> Statistic:
    """[P, E, 5] -> weights -> [E]: variance summed over questions, over that of `against`."""
    of_questions = variances(moments)

    def statistic(weights: np.ndarray) -> np.ndarray:
        found = weights @ of_questions
        return found / found[COMPARED.index(against)]

    return statistic


def variances_at_equal_step(moments: np.ndarray, steps: np.ndarray) -> Statistic:
    """The same for estimators scaled such that their mean's component along the gradient is the
    gradient. `steps` are the moments, of seq-mean-token-sum, that say how far each one goes."""
    relative = relative_variances(moments)
    along, signal = np.moveaxis(steps[..., 3:], -1, 0)
    in_sample = np.array([name in PAIRED for name in COMPARED])

    def statistic(weights: np.ndarray) -> np.ndarray:
        scale = np.where(in_sample, 1 + weights @ along / (weights @ signal), 1)
        return relative(weights) / scale**2

    return statistic


def question_biases(moments: np.ndarray) -> Statistic:
    """Weights -> [E]: |bias|^2 over |gradient|^2, both of each question and then summed."""
    delta, signal = moments[..., 2], moments[..., 4]

    def statistic(weights: np.ndarray) -> np.ndarray:
        return (weights @ delta) / (weights @ signal)

    return statistic


def batch_biases(stage: Stage) -> Statistic:
    """Weights -> [3, E]: squared norms of means over questions.

    That of the bias, and of what is left of it after the best scaling, both relative to the
    gradient's; and the latter relative to the variance of one group.
    """
    optimum = COMPARED.index("optimum")
    of_questions = variances(stage.moments[:, main_size(stage), 0, :optimum])

    def statistic(weights: np.ndarray) -> np.ndarray:
        # Two different questions are independent, so that no noise is squared.
        pairs = np.outer(weights, weights)
        np.fill_diagonal(pairs, 0)
        pairs /= pairs.sum()
        delta, along, signal = (stage.cross * pairs).sum((-1, -2))[:, :optimum]
        left = (signal * delta - along**2) / (signal + 2 * along + delta)
        variance = weights @ of_questions / weights.sum()
        return np.stack([delta / signal, left / signal, left / variance])

    return statistic


def main_size(stage: Stage) -> int:
    return stage.sizes.index(MAIN_SIZE)


def noise_to_signal(stage: Stage) -> Statistic:
    """Weights -> the variance of a group without baseline over its squared mean, both summed."""
    noise = variances(stage.moments[:, main_size(stage), 0])[:, COMPARED.index("none")]
    signal = stage.moments[:, main_size(stage), 0, 0, -1]

    def statistic(weights: np.ndarray) -> np.ndarray:
        return np.array(weights @ noise / (weights @ signal))

    return statistic


def correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    """Of Pearson; 0 where one of them is constant."""
    x, y = x - x.mean(), y - y.mean()
    norm = (x.square().sum() * y.square().sum()).sqrt().item()
    return 0.0 if norm == 0 else (x @ y).item() / norm


def log2_ratio(x: torch.Tensor, y: torch.Tensor) -> float:
    """Of the means; NaN where one has no values."""
    return torch.log2(x.mean() / y.mean()).item()


def facts(answers: Answers) -> list[float]:
    """Of one question: what FACTS names."""
    index = answers.index
    squared = answers.gram.diagonal()[index]
    lengths, energies, rewards = (
        values[index] for values in (answers.lengths, answers.energies, answers.rewards)
    )
    long, best = lengths > lengths.mean(), rewards.max()

    def per_token(chosen: torch.Tensor) -> float:
        return (squared[chosen].sum() / lengths[chosen].sum()).item()

    return [
        rewards.mean().item(),
        lengths.mean().item(),
        (lengths.std() / lengths.mean()).item(),
        correlation(lengths, rewards),
        correlation(lengths, squared),
        correlation(energies, squared),
        correlation(squared, rewards),
        np.log2(per_token(long) / per_token(~long)),
        log2_ratio(squared[rewards < best], squared[rewards == best]),
    ]


FACTS = (
    "share of right answers",
    "length in tokens",
    "deviation of the length / its mean",
    "correlation of length and reward",
    "correlation of length and \\|g\\|^2",
    "correlation of energy W and \\|g\\|^2",
    "correlation of \\|g\\|^2 and reward",
    "log2 of \\|g\\|^2 per token, answers above the mean length over those below",
    "log2 of mean \\|g\\|^2, wrong answers over right ones",
)


def weighted_means(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[P, C], [P] -> [C], over the rows where a value is known."""
    known = ~np.isnan(values)
    return (weights @ np.where(known, values, 0)) / (weights @ known)


def percent(cell: np.ndarray, digits: int = 0) -> str:
    value, low, high = 100 * cell
    if not np.isfinite(cell).all():
        return "unresolved"
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def bias_percent(cell: np.ndarray) -> str:
    """Where the interval is wider than the gradient is long, nothing is known."""
    return percent(cell, 2) if cell[2] - cell[1] < 1 else "unresolved"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main_table(stage: Stage, boot: Callable[[Statistic], np.ndarray]) -> str:
    moments = stage.moments[:, main_size(stage), 0]
    plain = boot(relative_variances(moments))
    fair = boot(variances_at_equal_step(moments, moments))
    question, batch = boot(question_biases(moments)), boot(batch_biases(stage))
    rows = []
    for e, name in enumerate(ESTIMATORS):
        cells = [percent(plain[:, e]), percent(fair[:, e]), bias_percent(question[:, e])]
        cells += [bias_percent(batch[:, i, e]) if name in PAIRED else "" for i in range(3)]
        rows.append([LABELS[name], *cells])
    rows[ESTIMATORS.index("optimum")][3] = ""
    header = [
        "baseline",
        "variance / none's",
        "at equal step",
        "bias^2 / gradient^2",
        "the same over many questions",
        "after the best scaling",
        "that / a group's variance",
    ]
    return table(header, rows)


def aggregation_table(stage: Stage, boot: Callable[[Statistic], np.ndarray]) -> str:
    columns, cells = [], []
    for a, aggregation in enumerate(AGGREGATIONS):
        for s, size in enumerate(stage.sizes):
            columns.append(f"{aggregation}, G={size}")
            moments = stage.moments[:, s]
            cells.append(boot(variances_at_equal_step(moments[:, a], moments[:, 0])))
    rows = [[LABELS[n], *(percent(c[:, e]) for c in cells)] for e, n in enumerate(ESTIMATORS)]
    return table(["baseline", *columns], rows)


def task_table(stage: Stage, boot: Callable[[Statistic], np.ndarray]) -> str:
    moments = [stage.tasks[:, i] for i in range(len(TASKS))]
    fair = [boot(variances_at_equal_step(m, m)) for m in moments]
    rows = [[LABELS[n], *(percent(c[:, e]) for c in fair)] for e, n in enumerate(ESTIMATORS)]
    known = [boot(relative_variances(m, against="optimum")) for m in moments]
    rows += [
        [f"{n}, of the optimum's", *(percent(c[:, COMPARED.index(n)]) for c in known)]
        for n in CONSTANTS
    ]
    return table(["baseline", *TASKS], rows)


def stage_tables(stage: Stage, effort: Effort) -> str:
    count = len(stage.answers)

    def boot(statistic: Statistic) -> np.ndarray:
        return bootstrap(statistic, count, effort.resamples)

    value, low, high = boot(noise_to_signal(stage))
    each = np.array([facts(answers) for answers in stage.answers])
    found = boot(lambda weights: weighted_means(each, weights))
    fact_rows = [
        [name, f"{value:.2f} [{low:.2f}, {high:.2f}]"]
        for name, (value, low, high) in zip(FACTS, found.T, strict=True)
    ]
    return (
        f"## {stage.name[0].upper()}{stage.name[1:]}\n\n"
        f"Without a baseline, the variance of a group of {MAIN_SIZE} is {value:.2f} "
        f"[{low:.2f}, {high:.2f}] times the squared norm of its mean.\n\n"
        f"Groups of {MAIN_SIZE}, seq-mean-token-sum, in percent:\n\n{main_table(stage, boot)}\n"
        "Variance at equal step, in percent of none's, for each group size:\n\n"
        f"{aggregation_table(stage, boot)}\n"
        "The same answers with other rewards: variance at equal step in percent of none's, and "
        "that of constant baselines, known from another sample, in percent of the optimum's:\n\n"
        f"{task_table(stage, boot)}\n"
        f"The answers, as means over questions:\n\n{table(['', 'mean'], fact_rows)}"
    )


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write_table(path: Path, stages: list[Stage], effort: Effort, seconds: float, command: str):
    text = "# Variance and bias of the policy gradient, by baseline\n\n"
    text += (
        f"`{command}`: {seconds:.0f} s on one core of {os.cpu_count()} ({cpu_name()}), Python "
        f"{platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}.\n\n"
        f"{effort.questions} held-out questions, {effort.sample} answers to each (and as many for "
        f"the constant baselines), {effort.shuffles} ways to group them. In brackets: 95 % "
        "bootstrap intervals over questions. [docs/variance.md](../../docs/variance.md) explains "
        "the columns.\n\n"
    )
    text += "\n".join(stage_tables(stage, effort) for stage in stages)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_figure(path: Path, stages: list[Stage], effort: Effort) -> None:
    figure, (over_time, over_tasks, scatter) = plt.subplots(
        1, 3, figsize=(13, 4.2), width_ratios=(3, 3, 3.5)
    )
    during = [stage.moments[:, main_size(stage), 0] for stage in stages]
    first = stages[0]
    by_stage = dict(zip([s.name for s in stages], during, strict=True))
    draw_variances(over_time, by_stage, STAGE_COLORS, effort)
    of_tasks = dict(zip(TASKS, np.moveaxis(first.tasks, 1, 0), strict=True))
    draw_variances(over_tasks, of_tasks, TASK_COLORS, effort)
    draw_answers(scatter, first)
    over_time.set_title(f"reward: {TASKS[0]}", fontsize=10, loc="left")
    over_tasks.set_title(f"at the {first.name}, other rewards", fontsize=10, loc="left")
    scatter.set_title(f"answers at the {first.name}", fontsize=10, loc="left")
    over_time.set_yticks(range(len(ESTIMATORS)), [figure_label(name) for name in ESTIMATORS])
    over_tasks.set_yticks(range(len(ESTIMATORS)), [])
    for axis in (over_time, over_tasks, scatter):
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(
            frameon=False,
            fontsize=8,
            ncols=3,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.16),
            columnspacing=1,
            markerscale=1.2,
            handletextpad=0.3,
        )
    figure.tight_layout(w_pad=0.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_variances(
    axis, moments: dict[str, np.ndarray], colors: tuple[str, ...], effort: Effort
) -> None:
    """A row for each estimator, a colour for each of the named moments [P, E, 5]."""
    for i, (label, of_one) in enumerate(moments.items()):
        statistic = variances_at_equal_step(of_one, of_one)
        fair = 100 * bootstrap(statistic, len(of_one), effort.resamples)
        value, low, high = fair[:, : len(ESTIMATORS)]
        axis.errorbar(
            value,
            np.arange(len(ESTIMATORS)) + (i - 1) * 0.2,
            xerr=np.maximum([value - low, high - value], 0),
            fmt="o",
            markersize=5,
            color=colors[i],
            capsize=2,
            elinewidth=1,
            label=label,
        )
    axis.axvline(100, color="#999999", linewidth=0.8, linestyle=":", zorder=0)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.xaxis.set_minor_locator(NullLocator())
    axis.invert_yaxis()
    axis.set_xlabel("variance at equal step, % of no baseline's")


def figure_label(name: str) -> str:
    return "optimum" if name == "optimum" else LABELS[name].partition(" (")[0]


def draw_answers(axis, stage: Stage) -> None:
    """|g|^2 against length, both relative to the mean of their question, for each answer."""
    points: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for answers in stage.answers:
        length, square, reward = (
            values[answers.index].numpy()
            for values in (answers.lengths, answers.gram.diagonal(), answers.rewards)
        )
        relative = np.stack([length / length.mean(), square / square.mean()])
        for right in points:
            points[right].append(relative[:, (reward == 1) == right])
    for right, color in ((False, "#999999"), (True, "#117733")):
        x, y = np.concatenate(points[right], 1)
        label = "right" if right else "wrong"
        axis.scatter(x, y, 6, color=color, alpha=0.3, linewidths=0, label=label, rasterized=True)
    line = np.geomspace(0.2, 2.5, 50)
    axis.plot(line, line, color="#333333", linewidth=1, label="as OPO assumes")
    axis.set_yscale("log")
    axis.set_xlabel("length / mean of its question")
    axis.set_ylabel("$|g|^2$ / mean of its question")
