"""The tables of the report, from what `report_inputs` read."""

from collections import Counter
from collections.abc import Callable

import numpy as np

from mdlm_jax.metrics.interval import LEVEL
from mdlm_jax.metrics.tables import Table, brackets, duration, percent, points
from mdlm_jax.programs.report_inputs import POLICIES, SYSTEMS

PERCENT_ROWS = {
    "exact_match": "Exact match",
    "observation_exact_match": "Exact match, observation alone",
    "status_accuracy": "Exact match, status alone",
}
SCORERS = {"exact_match": "Exact match", "bleu1": "BLEU-1", "rouge_l": "ROUGE-L"}
DIAGNOSTICS = {
    "reward": "Reward",
    "entropy": "Entropy of the policy (nats per token)",
    "kl": "KL from the reference policy",
    "grad_norm": "Gradient norm",
    "clip_ratio/region_mean": "Share of clipped tokens",
    "frac_reward_zero_std": "Groups whose rewards are all equal",
    "episode/turns_mean": "Turns per episode",
    "episode/valid_action_ratio": "Valid actions",
    "env/wm_error_ratio": "Episodes in which the world model failed",
    "step_time": "Seconds per step",
}
NONE = "-"  # a cell without a number


def world_table(world: dict) -> Table:
    """Every measure of evaluate/world.json, one column per system."""
    names = [name for name in SYSTEMS if name in world["systems"]]
    systems = [world["systems"][name] for name in names]
    rows = [
        (title, *(_measure(system.get(key)) for system in systems))
        for key, title in PERCENT_ROWS.items()
    ]
    sources = dict.fromkeys(source for system in systems for source in system["by_source"])
    for source in sources:
        cells = (_optional(system["by_source"].get(source), percent) for system in systems)
        rows.append((f"Exact match after {source} actions", *cells))
    rows += [
        ("BLEU-1 (0-100)", *(f"{system['bleu1']['value']:.2f}" for system in systems)),
        ("ROUGE-L F1 (0-1)", *(_decimal(system["rouge_l"]) for system in systems)),
        ("Tokens per forward pass", *(f"{s['tokens_per_forward']:.2f}" for s in systems)),
        (
            "Tokens per denoising pass",  # passes that only fill the cache are not counted
            *(_optional(s.get("tokens_per_denoise"), "{:.2f}".format) for s in systems),
        ),
        ("Generation, seconds", *(f"{system['seconds']:.1f}" for system in systems)),
        ("Samples", *(str(system["samples"]) for system in systems)),
    ]
    note = f"In brackets: {percent(LEVEL, 0)} bootstrap interval. {_settings(world['settings'])}"
    for key, title in SCORERS.items():
        if "settings" in systems[0][key]:
            note += f" {title}: {systems[0][key]['settings']}."
    header = ("World model, held-out games", *(SYSTEMS[name] for name in names))
    return Table(header, tuple(rows), note)


def agent_table(agent: dict) -> Table:
    """Success before and after GRPO, in reality and in the dream (evaluate/agent.json)."""
    rows = [_agent_row(title, agent["policies"][when]) for when, title in POLICIES.items()]
    gain = agent["difference"]
    gained = f"{points(gain['value'])} {brackets(gain['interval'], signed=True)}"
    rows.append(("Difference", gained, *[NONE] * 4))
    if "expert_success" in agent:
        rows.append(("Expert (gold path)", _measure(agent["expert_success"]), *[NONE] * 4))
    games = agent["policies"]["after"]["games"]
    note = (
        f"{games} games of the test fold, the same for both. In brackets: {percent(LEVEL, 0)} "
        f"bootstrap interval. Gap: dream minus real. {_settings(agent['settings'])}"
    )
    header = ("Agent", "Real success", "Dream success", "Gap", "Real turns", "Valid actions")
    return Table(header, tuple(rows), note)


def _agent_row(title: str, policy: dict) -> tuple[str, ...]:
    real, dream = policy["real_success"], policy["dream_success"]
    return (
        title,
        _measure(real),
        _measure(dream),
        points(dream["value"] - real["value"]),
        f"{policy['real_turns']:.1f}",
        percent(policy["real_valid_action_ratio"]),
    )


def agreement_table(games: list[dict]) -> Table:
    """How often a game ends the same way in the dream and in reality."""
    rows = []
    for when, title in POLICIES.items():
        won = {
            where: {
                (g["game"], g["fold"], g["seed"]): g["success"]
                for g in games
                if g["policy"] == when and g["where"] == where
            }
            for where in ("real", "dream")
        }
        both = won["real"].keys() & won["dream"].keys()
        ends = Counter((won["real"][game], won["dream"][game]) for game in both)
        cells = (ends[True, True], ends[False, True], ends[True, False], ends[False, False])
        rows.append((title, *map(str, cells)))
    header = ("Games won", "in both", "only in the dream", "only in reality", "in neither")
    return Table(header, tuple(rows))


def wall_table(results: dict) -> Table:
    """Wall clock per program and in all, from results.json's content."""
    rows = tuple((name, duration(s)) for name, s in results["wall_seconds"].items())
    return Table(("Step", "Wall clock"), rows)


def diagnostics_table(rows: list[dict]) -> Table:
    """GRPO's health at both ends of the run."""
    span = max(1, len(rows) // 10)
    cells = []
    for key, title in DIAGNOSTICS.items():
        values = [row[key] for row in rows if key in row]
        if values:
            ends = (np.mean(values[:span]), np.mean(values[-span:]))
            cells.append((title, *(f"{end:.4g}" for end in ends)))
    steps = "step" if span == 1 else f"{span} steps"
    return Table(("GRPO", f"First {steps}", f"Last {steps}"), tuple(cells))


def _measure(measure: dict | float | None) -> str:
    """A share, with its interval if it has one, in percent; a dash where there is no number."""
    if measure is None:
        return NONE
    if not isinstance(measure, dict):
        return percent(measure)
    interval = measure.get("interval")
    return percent(measure["value"]) + (f" {brackets(interval)}" if interval else "")


def _decimal(measure: dict) -> str:
    interval = measure.get("interval")
    text = f"{measure['value']:.3f}"
    return text + (f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else "")


def _optional(value: float | None, write: Callable[[float], str]) -> str:
    return NONE if value is None else write(value)


def _settings(settings: dict) -> str:
    return "Settings: " + ", ".join(f"{key}={value}" for key, value in settings.items()) + "."
