"""The report's page, section by section, from what `report_inputs` read."""

from pathlib import Path

from ml_collections import ConfigDict

from mdlm_jax.metrics import page, pictures
from mdlm_jax.metrics.interval import LEVEL
from mdlm_jax.metrics.tables import as_html, brackets, duration, percent, points
from mdlm_jax.metrics.unmasking import inversions, passes_in_block
from mdlm_jax.programs.report_inputs import COMMANDS, POLICIES, Inputs, command_line
from mdlm_jax.programs.report_tables import (
    agent_table,
    agreement_table,
    diagnostics_table,
    wall_table,
    world_table,
)

SMOOTHING = 5  # steps in the running mean of the GRPO curves


def make_page(
    config: ConfigDict, workdir: Path, inputs: Inputs, results: dict, summary: str
) -> str:
    """The whole report as one HTML text that needs no other file; `results` is results.json's."""
    games = ", ".join(config.env.games)
    body = (
        "<h1>An agent trained inside a diffusion world model</h1>"
        + page.paragraph(f"{config.env.name} · {games} · seed {config.seed}", "kicker")
        + page.paragraph(summary, "lead")
        + page.cards(_cards(results))
        + _world_section(inputs)
        + _unmasking_section(inputs.samples)
        + _agent_section(inputs, results)
        + _rollout_section(inputs.replays)
        + _training_section(inputs.curves)
        + _commands_section(config, workdir, results)
    )
    return page.page(f"mdlm_jax report: {workdir.name}", body)


def _cards(results: dict) -> list[page.Card]:
    world, interval = results["world_exact_match"], results["world_exact_match_interval"]
    before, after = results["real_success_before"], results["real_success_after"]
    gap = results["dream_success_after"] - after
    return [
        page.Card(
            "World model, exact match",
            percent(world["diffusion"]),
            f"{brackets(interval['diffusion'])} · autoregressive {percent(world['ar'])}",
        ),
        page.Card(
            "Real success after GRPO",
            percent(after),
            f"{brackets(results['real_success_after_interval'])} · before {percent(before)}",
        ),
        page.Card(
            "Gain in reality",
            f"{100 * results['real_success_gain']:+.1f}",
            f"points {brackets(results['real_success_gain_interval'], signed=True)}",
        ),
        page.Card(
            "Success in the dream",
            percent(results["dream_success_after"]),
            f"{brackets(results['dream_success_after_interval'])} · gap {points(gap)}",
        ),
        page.Card(
            "Wall clock",
            duration(results["wall_seconds"]["total"]),
            f"{len(results['wall_seconds']) - 1} steps",
        ),
    ]


def _world_section(inputs: Inputs) -> str:
    wrong = [s for s in inputs.samples if s["system"] == "diffusion" and not _correct(s)]
    mistakes = [
        page.side_by_side(
            f"{s['action']}   ({s['game']}, seed {s['seed']}, turn {s['turn']})",
            (f"real · {s['status_reference']}", s["reference"]),
            (f"imagined · {s['status_prediction']}", s["prediction"]),
        )
        for s in wrong[:3]
    ]
    title = f"Wrong answers of the diffusion model: {len(mistakes)} of {len(wrong)}"
    folded = page.folded(title, *mistakes) if mistakes else ""
    return page.section("World model", as_html(world_table(inputs.world)), folded)


def _unmasking_section(samples: list[dict]) -> str:
    sample = _choose_sample(samples)
    if sample is None:
        return page.section("Order of unmasking", page.paragraph("The model wrote no token."))
    tokens, grid = sample["tokens"], (sample["block_length"], sample["block_offset"])
    svg = pictures.unmasking_order(
        tokens,
        passes_in_block(sample["order"], *grid),
        block_length=grid[0],
        block_offset=grid[1],
    )
    verdict, choice = (
        ("equal to the real one", "Of the right answers, the one filled least from left to right.")
        if _correct(sample)
        else ("not equal to the real one", "No answer was entirely right.")
    )
    caption = (
        f"The world model's answer to “{sample['action']}” ({sample['game']}, seed "
        f"{sample['seed']}, turn {sample['turn']}), {verdict}: {len(tokens)} tokens in "
        f"{len(set(sample['order']))} passes. A frame is a block of {sample['block_length']} "
        "tokens, denoised together; the number in a box is the pass that filled it, counted from "
        f"1 in each block. Equal numbers in a frame were filled at the same time. {choice}"
    )
    return page.section("Order of unmasking", page.figure(svg, caption))


def _agent_section(inputs: Inputs, results: dict) -> str:
    bars = [
        pictures.Bars(
            label,
            [results[f"{where}_success_{when}"] for when in POLICIES],
            [results[f"{where}_success_{when}_interval"] for when in POLICIES],
            color,
        )
        for where, label, color in (
            ("real", "real environment", pictures.GREEN),
            ("dream", "inside the world model", pictures.BLUE),
        )
    ]
    svg = pictures.bar_chart(
        list(POLICIES.values()), bars, y_label="success", y_range=(0, 1.08), percent=True
    )
    caption = f"Success with its {percent(LEVEL, 0)} bootstrap interval."
    return page.section(
        "Agent",
        as_html(agent_table(inputs.agent)),
        page.figure(svg, caption),
        "<h3>Game by game</h3>",
        as_html(agreement_table(inputs.games)),
    )


def _rollout_section(replays: list[dict]) -> str:
    turns = [turn for replay in replays for turn in replay["turns"]]
    agree = sum(not _differs(turn) for turn in turns)
    replay = _choose_replay(replays)
    shown = [
        page.side_by_side(
            turn["action"],
            (f"real · {turn['real_status']}", turn["real"]),
            (f"imagined · {turn['imagined_status']}", turn["imagined"]),
        )
        for turn in replay["turns"]
    ]
    text = (
        f"{POLICIES[replay['policy']]}, {replay['game']}, seed {replay['seed']}: the actions of a "
        "dreamed episode, replayed in the real engine. Words that differ are marked. Over all "
        f"{len(replays)} replayed episodes {agree} of {len(turns)} turns are identical."
    )
    return page.section("One episode, real and imagined", page.paragraph(text), *shown)


def _training_section(curves: dict[str, list[dict]]) -> str:
    losses = []
    for name, label, color, style in (
        ("world_diffusion", "diffusion", pictures.BLUE, "solid"),
        ("world_autoregressive", "autoregressive", pictures.ORANGE, "dashed"),
    ):
        losses.append(_series(curves[name], "loss", "", color, "faint"))
        losses.append(_series(curves[name], "dev_loss", f"{label}, dev fold", color, style))
    policy = [
        _series(curves["policy"], "loss", "train", pictures.GREY, "faint"),
        _series(curves["policy"], "dev_loss", "dev fold", pictures.GREY, "solid"),
    ]
    return page.section(
        "Training",
        "<h3>World models</h3>",
        page.figure(
            pictures.learning_curves(losses, x_label="update", y_label="loss", log_y=True),
            "Loss per trained token, train (faint) and dev. The diffusion loss is a weighted bound "
            "and the autoregressive one a log-likelihood, so compare shapes, not levels.",
        ),
        "<h3>GRPO inside the world model</h3>",
        _grpo_figure(curves["grpo"]),
        page.folded("GRPO diagnostics", as_html(diagnostics_table(curves["grpo"]))),
        page.folded(
            "Warm start of the policy",
            page.figure(
                pictures.learning_curves(policy, x_label="update", y_label="loss", log_y=True),
                "Behaviour cloning: loss per action token.",
            ),
        ),
    )


def _grpo_figure(rows: list[dict]) -> str:
    dream = _series(rows, "episode/success_rate", "", pictures.BLUE, "faint")
    reward = _series(rows, "reward", "", pictures.ORANGE, "faint")
    real = _series(rows, "eval_real_success", "real success, dev fold", pictures.GREEN, "points")
    series = [dream, _smoothed(dream, "dream success", "solid"), real]
    if reward.y != dream.y:  # a reward that is success itself needs no second curve
        series += [reward, _smoothed(reward, "reward", "dashed")]
    y_range = (min([0, *reward.y]), max([1, *reward.y]) * 1.02)
    svg = pictures.learning_curves(series, x_label="step", y_label="mean", y_range=y_range)
    caption = (
        f"Each step's sampled episodes in the dream (faint: as they are; strong: mean of "
        f"{SMOOTHING} steps), and the policy of that step in real games of the dev fold."
    )
    return page.figure(svg, caption)


def _smoothed(series: pictures.Series, label: str, style: str) -> pictures.Series:
    means = pictures.running_mean(series.y, SMOOTHING)
    return pictures.Series(label, series.x, means, series.color, style)


def _commands_section(config: ConfigDict, workdir: Path, results: dict) -> str:
    lines = [command_line(step, "$CONFIG", "$RUN") for step in COMMANDS]
    head = ["CONFIG=...  # this run's file; its values are below", f"RUN={workdir}"]
    script = "\n".join([*head, *lines])
    return page.section(
        "Time and commands",
        as_html(wall_table(results)),
        "<h3>Reproduce</h3>",
        page.preformatted(script),
        page.folded("Configuration", page.preformatted(config.to_json(indent=2))),
    )


def _choose_sample(samples: list[dict]) -> dict | None:
    """The diffusion sample to draw: right, long enough to see blocks, least left-to-right."""

    def rank(s: dict) -> tuple[bool, bool, int]:
        fits = 24 <= len(s["tokens"]) <= 128
        return _correct(s), fits, inversions(s["order"], s["block_length"], s["block_offset"])

    drawn = [s for s in samples if s["system"] == "diffusion" and s["tokens"]]
    return max(drawn, key=rank, default=None)


def _correct(sample: dict) -> bool:
    return (sample["prediction"], sample["status_prediction"]) == (
        sample["reference"],
        sample["status_reference"],
    )


def _choose_replay(replays: list[dict]) -> dict:
    """A long episode of the trained policy, preferably one in which one turn went wrong."""
    trained = [r for r in replays if r["policy"] == "after"] or replays
    imperfect = [r for r in trained if any(map(_differs, r["turns"]))]
    if imperfect:
        return min(imperfect, key=lambda r: (sum(map(_differs, r["turns"])), -len(r["turns"])))
    return max(trained, key=lambda r: len(r["turns"]))


def _differs(turn: dict) -> bool:
    return (turn["real"], turn["real_status"]) != (turn["imagined"], turn["imagined_status"])


def _series(rows: list[dict], key: str, label: str, color: str, style: str) -> pictures.Series:
    """The rows that carry `key`, over their steps."""
    with_key = [row for row in rows if key in row]
    return pictures.Series(
        label, [row["step"] for row in with_key], [row[key] for row in with_key], color, style
    )
