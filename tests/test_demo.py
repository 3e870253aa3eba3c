"""The mixed-fleet demo: number formats, task, samplers' records, and a few steps of each experiment."""

from __future__ import annotations

import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers", minversion="5.0")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.mixed_fleet import quantize, report, task, train, workers
from examples.mixed_fleet.experiments import make_plan
from examples.mixed_fleet.fleet import (
    MIXED_FLEET,
    ON_POLICY_FLEET,
    Fleet,
    Sampling,
    candidates_of,
    generate,
    split_requests,
)
from examples.mixed_fleet.model import build_model, response_logits
from examples.mixed_fleet.progress import Progress

SMALL = task.Task(modulus=7, operands=3, mistakes=0.3)
PROMPTS = SMALL.problems(24, torch.Generator().manual_seed(1))


def small_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    model = build_model(
        SMALL.vocab_size, SMALL.prompt_length + SMALL.response_length, seed, width=32, layers=1
    )
    return model.to(dtype).eval()


# number formats


def test_e2m1_holds_its_sixteen_values() -> None:
    values = torch.tensor(quantize.E2M1_VALUES)
    assert torch.equal(quantize.round_e2m1(values), values)
    assert torch.equal(quantize.round_e2m1(-values), -values)
    everything = quantize.round_e2m1(torch.linspace(-8, 8, 4001))
    assert sorted(set(everything.abs().tolist())) == list(quantize.E2M1_VALUES)


def test_e2m1_sends_ties_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    assert torch.equal(quantize.round_e2m1(ties), expected)
    assert torch.equal(quantize.round_e2m1(-ties), -expected)
    assert all(quantize.E2M1_VALUES.index(value) % 2 == 0 for value in expected.tolist())


@given(st.floats(-20, 20, width=32))
def test_e2m1_is_the_nearest_value(x: float) -> None:
    rounded = quantize.round_e2m1(torch.tensor(x)).item()
    best = min(abs(abs(x) - value) for value in quantize.E2M1_VALUES)
    assert abs(x - rounded) == pytest.approx(best, abs=1e-6)
    assert math.copysign(1.0, rounded) == math.copysign(1.0, x)


def test_e4m3_saturates_instead_of_overflowing() -> None:
    x = torch.tensor([448.0, 449.0, 1e6, -1e6, 0.0])
    assert torch.equal(quantize.round_e4m3(x), torch.tensor([448.0, 448.0, 448.0, -448.0, 0.0]))
    assert torch.equal(
        quantize.round_e4m3(torch.tensor([17.0, 19.0])), torch.tensor([16.0, 20.0])
    )  # ties to even


def test_nvfp4_block_scales_are_e4m3_and_serve_sixteen_values() -> None:
    weight = torch.zeros(2, 32)
    weight[0, :16] = torch.tensor(
        [0.5, 1, 1.5, 2, 3, 4, 6, -6] * 2
    )  # block scale 1 relative to the next one's 448
    weight[0, 16:] = 6 * 448.0
    weight[1, :16] = 0.1
    stored = quantize.nvfp4(weight).float()
    assert torch.equal(stored[0], weight[0])
    assert torch.equal(stored[1, 16:], torch.zeros(16))
    # 0.1 / 6 is stored as the e4m3 scale nearest to it, and the error of that scale is all that is left.
    scale = quantize.round_e4m3(torch.tensor(0.1 / 6))
    assert stored[1, :16].unique().numel() == 1
    assert stored[1, 0] == pytest.approx((6 * scale).item(), rel=2**-8)


@given(st.integers(0, 2**31), st.floats(-6, 3))
@settings(max_examples=40, deadline=None)
def test_round_trip_errors_are_bounded(seed: int, log_size: float) -> None:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)) * 10**log_size
    bf16_error = 2.0**-8
    largest = weight.abs().amax()
    error = (quantize.fp8_per_tensor(weight).float() - weight).abs()
    # e4m3 has four significant bits, and steps of 2^-9 below 2^-6 of its range of 448.
    assert (error <= (2.0**-4 + bf16_error) * weight.abs() + 2.0**-10 * largest / 448 * 1.01).all()
    tiles = (
        weight.view(1, 32, 2, 32).abs().amax(dim=(1, 3), keepdim=True).expand(1, 32, 2, 32).reshape(32, 64)
    )
    error = (quantize.fp8_block(weight).float() - weight).abs()
    assert (error <= (2.0**-4 + bf16_error) * weight.abs() + 2.0**-10 * tiles / 448 * 1.01).all()
    # NVFP4: half a step at the top of a block is 1/6 of its largest value, and the scale may be off by 1/16.
    blocks = weight.view(32, 4, 16).abs().amax(dim=-1, keepdim=True).expand(32, 4, 16).reshape(32, 64)
    error = (quantize.nvfp4(weight).float() - weight).abs()
    assert (error <= (1 / 6 * 17 / 16 + bf16_error) * blocks).all()


def test_finer_formats_err_less() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    errors = [
        (quantize.PRECISIONS[name](weight).float() - weight).pow(2).mean().item()
        for name in quantize.PRECISIONS
    ]
    assert errors[0] == 0 and errors == sorted(errors[:2]) + sorted(errors[2:4], reverse=True) + errors[4:]
    assert errors[1] < errors[3] < errors[4]


@pytest.mark.parametrize("precision", list(quantize.PRECISIONS))
def test_zeros_stay_zero(precision: str) -> None:
    assert torch.equal(quantize.PRECISIONS[precision](torch.zeros(32, 32)).float(), torch.zeros(32, 32))


def test_weights_that_do_not_divide_into_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 16"):
        quantize.nvfp4(torch.zeros(4, 24))
    with pytest.raises(ValueError, match="tiles of 32 x 32"):
        quantize.fp8_block(torch.zeros(32, 48))


def test_matrices_are_quantized_and_norms_are_not() -> None:
    trainer, sampler = small_model(), small_model(1, torch.bfloat16)
    quantize.load_quantized(sampler, dict(trainer.named_parameters()), "NVFP4")
    for (name, mine), theirs in zip(sampler.named_parameters(), trainer.parameters(), strict=True):
        assert torch.equal(mine, theirs.to(torch.bfloat16)) == ("norm" in name), name


# task


def test_a_worked_example() -> None:
    worked = task.Task(modulus=17, operands=4)
    numbers, operators = [7, 9, 4, 5], [task.PLUS, task.TIMES, task.MINUS]
    prompt = [task.BOS]
    for number, operator in zip(numbers, [*operators, task.EQUALS], strict=True):
        prompt += [number + task.FIRST_NUMBER, operator]
    prompts = torch.tensor([prompt])
    response = worked.responses(worked.solve(prompts))
    assert task.show(prompts[0]) == "<bos> 7 + 9 * 4 - 5 ="
    assert task.show(response[0]) == "16 ; 13 ; 8 # 8 <eos>"
    assert worked.reward(prompts, response)[0].item() == 1


def test_the_verifier_takes_right_answers_in_the_right_format_only() -> None:
    answers = SMALL.responses(SMALL.solve(PROMPTS))
    right, formatted = SMALL.reward(PROMPTS, answers)
    assert right.all() and formatted.all()
    wrong = answers.clone()
    wrong[:, -2] = task.FIRST_NUMBER + (wrong[:, -2] - task.FIRST_NUMBER + 1) % SMALL.modulus
    right, formatted = SMALL.reward(PROMPTS, wrong)
    assert not right.any() and formatted.all()
    for position in range(SMALL.response_length):
        broken = answers.clone()
        broken[:, position] = task.BOS
        right, formatted = SMALL.reward(PROMPTS, broken)
        assert not right.any() and not formatted.any()


def test_demonstrations_err_as_often_as_they_say() -> None:
    drawn = SMALL.demonstrations(4000, torch.Generator().manual_seed(2))
    prompts, responses = drawn[:, : SMALL.prompt_length], drawn[:, SMALL.prompt_length :]
    first_right = (responses[:, 0] - task.FIRST_NUMBER == SMALL.solve(prompts)[:, 0]).float().mean().item()
    assert first_right == pytest.approx(
        0.7 + 0.3 / 7, abs=0.03
    )  # a wrong number is right by luck once in seven


# samplers


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.06)])
def test_recorded_logprobs_are_those_of_a_full_forward_pass(dtype: torch.dtype, tolerance: float) -> None:
    model = small_model(dtype=dtype)
    sampling = Sampling(temperature=0.8, head_size=6)
    rollouts = generate(
        model, PROMPTS, SMALL.response_length, sampling, torch.Generator().manual_seed(3), fp8_cache=False
    )
    sequences = torch.cat([PROMPTS, rollouts.responses], dim=1)
    with torch.no_grad():
        logp = (response_logits(model, sequences, SMALL.prompt_length).float() / 0.8).log_softmax(-1)
    sampled = logp.gather(-1, rollouts.responses[..., None])[..., 0]
    torch.testing.assert_close(
        rollouts.logprobs[rollouts.mask], sampled[rollouts.mask], atol=tolerance, rtol=0
    )
    head = logp.gather(-1, rollouts.candidate_ids)
    torch.testing.assert_close(
        rollouts.candidate_logprobs[rollouts.mask], head[rollouts.mask], atol=tolerance, rtol=0
    )


def test_an_fp8_cache_changes_the_distribution_a_little() -> None:
    model = small_model()
    runs = [
        generate(model, PROMPTS, 4, Sampling(), torch.Generator().manual_seed(3), fp8_cache=fp8)
        for fp8 in (True, False)
    ]
    difference = (runs[0].logprobs[:, 0] - runs[1].logprobs[:, 0]).abs()
    assert 0 < difference.max() < 0.1


def test_the_recorded_top_p_set_is_all_that_can_be_drawn() -> None:
    logits = 2 * torch.randn(200, 23, generator=torch.Generator().manual_seed(5))
    logprobs, ids, recorded = candidates_of(logits, Sampling(temperature=0.7, top_p=0.9))
    drawable = logprobs.isfinite()
    full = (logits / 0.7).softmax(-1)
    for row in range(len(logits)):
        kept = ids[row][ids[row] >= 0]
        assert set(kept.tolist()) == set(drawable[row].nonzero()[:, 0].tolist())
        torch.testing.assert_close(recorded[row, : len(kept)], logprobs[row, kept])
        assert full[row, kept].sum() >= 0.9 - 1e-6  # reaches the mass,
        assert full[row, kept[:-1]].sum() < 0.9 or len(kept) == 1  # and is the smallest set that does
        assert recorded[row, len(kept) :].eq(-torch.inf).all()
    torch.testing.assert_close(recorded.exp().sum(-1), torch.ones(200))


def test_records_of_every_group_validate() -> None:
    for sampling in (Sampling(head_size=5), Sampling(top_p=0.8)):
        fleet = Fleet(MIXED_FLEET, SMALL.vocab_size, SMALL.prompt_length + SMALL.response_length, seed=1)
        for seed in range(3):
            fleet.publish(build_model(SMALL.vocab_size, 64, seed))
        rollouts, row = fleet.sample(PROMPTS.repeat(5, 1), SMALL.response_length, sampling)
        record = train.sampler_record(rollouts, MIXED_FLEET).validate(vocab_size=SMALL.vocab_size)
        assert len(record.tokens) == rollouts.mask.sum()
        assert torch.equal(rollouts.prompts, PROMPTS.repeat(5, 1)[row])
        ages = {g: 2 - v for g, v in zip(rollouts.group.tolist(), rollouts.version.tolist(), strict=True)}
        assert ages == {g: min(group.lag, 2) for g, group in enumerate(MIXED_FLEET)}


def test_requests_are_split_by_share() -> None:
    sizes = split_requests([group.share for group in MIXED_FLEET], 256)
    assert sum(sizes) == 256
    assert all(abs(size - 256 * group.share) < 1 for size, group in zip(sizes, MIXED_FLEET, strict=True))
    assert sum(group.share for group in MIXED_FLEET) == pytest.approx(1)


def test_the_on_policy_control_samples_from_the_trainer() -> None:
    model = build_model(SMALL.vocab_size, 64, 3)
    fleet = Fleet(ON_POLICY_FLEET, SMALL.vocab_size, 64, seed=1)
    fleet.publish(model)
    rollouts, _ = fleet.sample(PROMPTS, SMALL.response_length, Sampling())
    logits = response_logits(
        model, torch.cat([rollouts.prompts, rollouts.responses], dim=1), SMALL.prompt_length
    )
    logp = logits.detach().log_softmax(-1).gather(-1, rollouts.responses[..., None])[..., 0]
    torch.testing.assert_close(rollouts.logprobs[rollouts.mask], logp[rollouts.mask], atol=1e-5, rtol=0)


# training


@pytest.fixture(scope="module")
def warmed_up() -> dict[str, torch.Tensor]:
    settings = train.Warmup(steps=20, batch=32)
    return train.warm_up(SMALL, settings, seed=0).state_dict()


def small_run(
    arm: train.Arm, weights: dict[str, torch.Tensor], optimizer: str = "adam", seed: int = 1
) -> train.History:
    budget = train.Budget(
        steps=3, prompts=4, samples=8, learning_rate=1e-3, optimizer=optimizer, evaluate_every=2
    )
    return train.run_arm(arm, budget, SMALL, weights, seed)


def test_a_seed_fixes_a_run(warmed_up: dict[str, torch.Tensor]) -> None:
    arm = train.Arm("SC + MIS", "sc+mis")
    first, again, other = (small_run(arm, warmed_up, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.updates != other.updates


def test_every_arm_runs_and_reports(
    warmed_up: dict[str, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = pytest.importorskip("examples.mixed_fleet.figure")
    plan = make_plan(quick=True)
    results: report.Results = {}
    for experiment in plan.experiments:
        results[experiment.name] = {
            arm.name: [small_run(arm, warmed_up, experiment.budget.optimizer)] for arm in experiment.arms
        }
    report.print_report(replace(plan, task=SMALL), results)
    printed = capsys.readouterr().out
    assert all(arm.name.split()[-1] in printed for experiment in plan.experiments for arm in experiment.arms)
    report.write_json(tmp_path / "results.json", plan, results, {"command": "test"})
    written = json.loads((tmp_path / "results.json").read_text())
    assert {"run", "machine", "plan", "summary", "groups", "curves"} <= written.keys()
    assert all(
        math.isfinite(row["reward"]) for row in written["curves"]["learning"]["SC + MIS"][0]["evaluations"]
    )
    figure.save(tmp_path / "picture.png", plan, results)
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_without_a_terminal_every_arm_gets_a_line_when_it_ends(
    warmed_up: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    plan, buffer = make_plan(quick=True), io.BytesIO()
    torch.save(warmed_up, buffer)
    budget = train.Budget(
        steps=2, prompts=4, samples=8, learning_rate=1e-3, optimizer="sgd", evaluate_every=2
    )
    drift, learning = (replace(e, arms=e.arms[-1:], budget=budget, seeds=(1,)) for e in plan.experiments)
    small = replace(plan, task=SMALL, drift=drift, learning=learning)
    progress = Progress(total=4)
    progress.say("begins")
    results = workers.run_all(small, buffer.getvalue(), 2, progress)
    progress.close()
    began, *ends = capsys.readouterr().out.splitlines()
    assert began.split() == ["0", "%", "0", "s", "begins"]
    assert sorted(line.split("s  ", 1)[1].split("  ")[0] for line in ends) == [
        "drift, seed 1: SC + MIS",
        "learning, seed 1: SC + MIS + top-p",
    ]
    for experiment, arm in (("drift", "SC + MIS"), ("learning", "SC + MIS + top-p")):
        (history,) = results[experiment][arm]
        (line,) = (line for line in ends if f"{experiment}, seed" in line)
        assert line.endswith(
            f"reward {history.evaluations[0]['reward']:.2f} > {history.evaluations[-1]['reward']:.2f}, 2 updates"
        )
