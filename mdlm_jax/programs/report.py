"""Turn what the other programs wrote under a workdir into one page and one file of numbers.

Reads `report_inputs.FILES`, writes `results.json` and `report.html`, prints the tables.
"""

from collections import Counter
from pathlib import Path

from ml_collections import ConfigDict

from mdlm_jax.check import user_errors
from mdlm_jax.metrics.interval import LEVEL
from mdlm_jax.metrics.tables import as_text, brackets, percent, points
from mdlm_jax.programs import files
from mdlm_jax.programs.report_inputs import POLICIES, Inputs, read_inputs
from mdlm_jax.programs.report_page import make_page
from mdlm_jax.programs.report_tables import agent_table, wall_table, world_table


def run(config: ConfigDict, workdir: Path) -> None:
    """Write `results.json` and `report.html` into `workdir` and print the final tables.

    Raises UserError (a ValueError) that names each missing file with the command that makes it,
    or the file and line that can't be read.
    """
    with user_errors():
        inputs = read_inputs(workdir)
    results = make_results(inputs)
    text = summary(results)
    files.write_json(workdir / "results.json", results)
    html = make_page(config, workdir, inputs, results, text)
    files.write_text(workdir / "report.html", html)
    for table in (world_table(inputs.world), agent_table(inputs.agent), wall_table(results)):
        print(as_text(table), end="\n\n")
    print(text)
    print(f"\nwrote {workdir / 'results.json'} and {workdir / 'report.html'}")


def make_results(inputs: Inputs) -> dict:
    """The content of results.json: shares are 0..1, times seconds, intervals [low, high]."""
    systems, policies = inputs.world["systems"], inputs.agent["policies"]
    short = {"ar" if name == "autoregressive" else name: s for name, s in systems.items()}
    results = {
        "interval_level": LEVEL,
        "world_exact_match": {k: s["exact_match"]["value"] for k, s in short.items()},
        "world_exact_match_interval": {k: s["exact_match"]["interval"] for k, s in short.items()},
        "world_bleu1": {k: s["bleu1"]["value"] for k, s in short.items()},
        "world_rouge_l": {k: s["rouge_l"]["value"] for k, s in short.items()},
        "world_tokens_per_forward": {k: s["tokens_per_forward"] for k, s in short.items()},
        "world_samples": {k: s["samples"] for k, s in short.items()},
    }
    for where in ("real", "dream"):
        for when in POLICIES:
            measure = policies[when][f"{where}_success"]
            results[f"{where}_success_{when}"] = measure["value"]
            results[f"{where}_success_{when}_interval"] = measure["interval"]
    results["real_success_gain"] = inputs.agent["difference"]["value"]
    results["real_success_gain_interval"] = inputs.agent["difference"]["interval"]
    results["games"] = policies["after"]["games"]
    results["wall_seconds"] = _wall_seconds(inputs.wall)
    return results


def _wall_seconds(wall: list[dict]) -> dict[str, float]:
    """Seconds per program; the parts of a resumed program are added."""
    seconds: Counter[str] = Counter()
    for line in wall:
        name = " ".join(line[key] for key in ("program", "what", "kind") if line[key])
        seconds[name] += line["seconds"]
    return {**seconds, "total": sum(seconds.values())}


def summary(results: dict) -> str:
    """What happened, in sentences whose wording follows from the numbers."""
    world, dream = results["world_exact_match"], results["dream_success_after"]
    speed = results["world_tokens_per_forward"]["diffusion"]
    gap = dream - results["real_success_after"]
    return (
        f"On {results['world_samples']['diffusion']} held-out actions the diffusion world model "
        f"writes exactly the real next turn {percent(world['diffusion'])} of the time, at "
        f"{speed:.1f} tokens per forward pass; the autoregressive baseline does so "
        f"{percent(world['ar'])} of the time. {_gain_sentence(results)} In the world model's "
        f"imagination the trained agent succeeds in {percent(dream)} of the games, "
        f"{abs(100 * gap):.1f} points {'more' if gap >= 0 else 'less'} than in reality."
    )


def _gain_sentence(results: dict) -> str:
    gain, (low, high) = results["real_success_gain"], results["real_success_gain_interval"]
    verb = "raised" if gain > 0 else "lowered" if gain < 0 else "did not change"
    certain = "excludes" if low > 0 or high < 0 else "includes"
    return (
        f"GRPO inside the diffusion model {verb} the agent's success in {results['games']} real, "
        f"unseen games: {percent(results['real_success_before'])} before, "
        f"{percent(results['real_success_after'])} after, a difference of {points(gain)} whose "
        f"{percent(LEVEL, 0)} interval {brackets((low, high), signed=True)} {certain} zero."
    )
