"""A rehearsed step has the bytes of a real one, and sizes of known models; what cannot be sized is refused."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
import typer
from matplotlib.image import imread

from consumers.trainer.distributed.layout import Layout
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.step.optimizers import build_optimizer
from deploy.export.plot import plot_memory
from deploy.offline.tiny_vision_model import Family, write_tiny_vision_model
from deploy.planning.cards import ARITHMETIC, BANDWIDTH, CARDS, TRANSFER, USABLE, find_links, step_time
from deploy.planning.changes import changes, layouts, rehearse_apart
from deploy.planning.command import plan
from deploy.planning.fit import PARTS, EngineSize, as_json, fit, size_engines, trainer_ranks, trainer_room, vllm_shares
from deploy.planning.rehearsal import make_batch
from deploy.planning.run_rates import figures
from schemas.config import OptimizerConfig, PlacementConfig, TidemillConfig, by_pool, dump_config, parse_config
from schemas.errors import ConfigError
from tests.support.models.tiny_mixture import build_mixture
from tests.support.models.tiny_model import make_tiny_model
from tests.support.trainer.sized_steps import configuration, measure_step

PEAK_TOLERANCE = 0.1
ADAMW_8BIT = OptimizerConfig(name="adamw_8bit")
QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}

MORE = pytest.mark.matrix("one more setting of a rehearsed step")


@pytest.mark.parametrize(
    "trainer",
    [
        {},
        pytest.param({"activation_checkpointing": True}, marks=MORE),
        pytest.param({"lora": {"rank": 4}}, marks=MORE),
        pytest.param({"optimizer": {"name": "muon"}}, marks=MORE),
        pytest.param({"optimizer": {"offload": True}}, marks=MORE),
        {"critic": {}, "advantage": {"name": "gae"}},
    ],
)
def test_a_rehearsed_step_has_the_bytes_of_a_real_one(tmp_path: Path, trainer: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = configuration(make_tiny_model(tmp_path / "model", hidden=128, layers=4), **trainer)
    real, rehearsed = measure_step(config), rehearse_apart(config, 1, on_gpu=False)
    assert rehearsed["optimizer"] == real["optimizer"]
    assert rehearsed["gradients"] == real["gradients"]
    assert rehearsed["flops"] == real["flops"]
    # Buffers are counted too: the frequencies of the rotary embedding.
    assert 0 <= rehearsed["parameters"] - real["parameters"] < 1024
    peak = sum(rehearsed[name] for name in ("gradients", "activations", "temporary"))
    assert peak == pytest.approx(real["peak"], rel=PEAK_TOLERANCE)


def test_a_reference_in_main_memory_takes_nothing_of_the_card(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, hidden=128, layers=4)
    none, away, held = (
        rehearse_apart(configuration(model, **({"kl": {"coef": 0.1, "device": where}} if where else {})), 2)
        for where in (None, "cpu", "same")
    )
    for name in ("parameters", "gradients", "optimizer", "flops", "waits", "step_waits"):
        assert away[name] == none[name], name
    assert away["activations"] == pytest.approx(none["activations"], rel=0.01)
    assert held["parameters"] > 1.1 * away["parameters"]
    assert held["flops"] > 1.2 * away["flops"]


@pytest.mark.parametrize(
    ("family", "frozen", "trainer"),
    [
        pytest.param("qwen2_5_vl", True, {}, marks=MORE),
        ("qwen3_vl", False, {}),
        pytest.param("qwen3_vl", True, {}, marks=MORE),
        pytest.param("qwen2_5_vl", False, {"critic": {}, "advantage": {"name": "gae"}}, marks=MORE),
    ],
)
def test_a_vision_model_has_the_bytes_of_its_tower_and_images(
    tmp_path: Path, family: Family, frozen: bool, trainer: dict[str, Any]
) -> None:
    write_tiny_vision_model(tmp_path, family)
    base = configuration(tmp_path, **trainer)
    config = base.model_copy(
        update={"model": base.model.model_copy(update={"kind": "vision", "freeze_vision": frozen})}
    )
    torch.manual_seed(0)
    rehearsed, real = rehearse_apart(config, 1, on_gpu=False), measure_step(config)
    assert rehearsed["optimizer"] == real["optimizer"]
    assert rehearsed["gradients"] == real["gradients"]
    assert rehearsed["flops"] == real["flops"]
    images = make_batch(config, Layout.of(1, config.trainer.parallel))[0].images
    assert images is not None
    assert len(images.grids) == 4
    # Real ones were there before the step was measured.
    held = sum(each.nbytes for each in images.tensors)
    peak = sum(rehearsed[name] for name in ("gradients", "activations", "temporary"))
    assert peak == pytest.approx(real["peak"] + held, rel=PEAK_TOLERANCE)


def test_moments_in_8_bits_take_a_byte_and_a_scale_for_256_of_them(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, hidden=128, layers=2)
    policy = Policy(load_model(model, "float32"))
    packed = [p.numel() for p in policy.parameters() if p.numel() >= 4096 and p.numel() % 256 == 0]
    others = [p.numel() for p in policy.parameters() if p.numel() < 4096 or p.numel() % 256]
    found = rehearse_apart(configuration(model, optimizer={"name": "adamw_8bit"}), 1)
    wanted = 2 * sum(size + size // 256 * 4 + 256 * 4 for size in packed) + 2 * 4 * sum(others)
    assert found["optimizer"] == wanted + 4 * len([*packed, *others])
    if find_spec("torchao") is not None:
        assert wanted == sum(bytes_in(each) for each in moments(build_optimizer(policy, ADAMW_8BIT)))


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]


def bytes_in(tensor: Any) -> int:
    """Of a tensor, or of those that torchao makes one of."""
    if type(tensor) is torch.Tensor:
        return tensor.nbytes
    return sum(getattr(tensor, name).nbytes for name in tensor.__tensor_flatten__()[0])


@MORE
def test_activations_in_main_memory_take_none_of_the_card(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, hidden=128, layers=12)
    kept, away = (
        rehearse_apart(configuration(model, activation_checkpointing=True, activation_offload=offload), 2)
        for offload in (False, True)
    )
    # Of 12 layers the inputs of 1,020 tokens, and what the last norm saves.
    states = 1020 * 128 * 4
    assert 12 * states <= kept["activations"] - away["activations"] <= 15 * states


@MORE
def test_an_optimizer_in_main_memory_takes_none_of_the_card_and_time_to_come(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, hidden=128, layers=12)
    kept, away = (
        rehearse_apart(configuration(model, optimizer={"offload": offload}, minibatches=2), 2)
        for offload in (False, True)
    )
    assert kept["main_memory"] == 0
    # Each parameter's step stays on the card.
    assert away["main_memory"] == pytest.approx(kept["optimizer"], rel=1e-3)
    assert 0 < away["optimizer"] < 4096
    assert away["flops"] == kept["flops"]
    total = [sum(each[part] for part in PARTS) for each in (kept, away)]
    assert total[1] == pytest.approx(total[0] - away["main_memory"], rel=0.02)
    assert [each["sent"] for each in away["traffic"] if each["kind"] == "optimizer state"] == [2 * away["main_memory"]]
    card = CARDS["h100"]
    times = [step_time(each, card, find_links(None, "h100")) for each in (kept, away)]
    waited = times[1].exchanges - times[0].exchanges
    assert waited == pytest.approx(2 * 2 * away["main_memory"] / (card.host * 1e9 * TRANSFER))


def test_main_memory_for_the_optimizer_is_tried_if_a_training_does_not_fit(tmp_path: Path) -> None:
    def texts(**trainer: Any) -> list[str]:
        return [each.text for each in changes(configuration(make_tiny_model(tmp_path), **trainer), 1, True)]

    assert "trainer.optimizer.offload=true" in texts()
    assert "trainer.optimizer.offload=true" not in texts(optimizer={"offload": True})
    assert "trainer.optimizer.offload=true" not in texts(optimizer={"name": "adamw_8bit"})


WHITENED = ["algorithms/advantages.py _sums", "distributed/ranks.py _all_reduce"]
EXPERTS = ["metrics/expert_load.py"]
SEQUENCE_RULE = {"measure": "k1", "level": "sequence", "upper": 1.0}


@pytest.mark.parametrize(
    ("kind", "trainer", "before", "once"),
    [
        ("dense", {"loss": {"name": "gspo"}}, [], []),
        ("dense", {"critic": {}, "advantage": {"name": "gae"}}, WHITENED, ["step/critic.py"]),
        pytest.param("dense", {"kl": {"coef": 0.1}, "rejection": [SEQUENCE_RULE]}, [], [], marks=MORE),
        pytest.param("dense", {"kl": {"coef": 0.1, "place": "reward"}}, [], [], marks=MORE),
        pytest.param("dense", {"lora": {"rank": 4}, "kl": {"coef": 0.1}}, [], [], marks=MORE),
        pytest.param("mixture", {}, [], EXPERTS, marks=MORE),
        pytest.param("mixture", {"router_replay": True}, [], [*EXPERTS, "model/router_replay.py"], marks=MORE),
        pytest.param("qwen2_5_vl", {}, [], [], marks=MORE),
        ("qwen3_vl", {}, [], []),
    ],
)
def test_the_host_waits_for_a_device_once_a_step_where_it_is_known_and_in_no_micro_batch(
    tmp_path: Path, kind: str, trainer: dict[str, Any], before: list[str], once: list[str]
) -> None:
    """Before the first backward pass for advantages that are whitened, after the last for metrics and the norm."""
    if kind == "mixture":
        build_mixture().save_pretrained(tmp_path)
    elif kind == "dense":
        make_tiny_model(tmp_path)
    else:
        write_tiny_vision_model(tmp_path, cast(Family, kind))
    config = configuration(tmp_path, **trainer)
    if kind in get_args(Family):
        config = config.model_copy(update={"model": config.model.model_copy(update={"kind": "vision"})})
    found = rehearse_apart(config, 2)
    assert found["waits"] == before
    files = {wait.split()[0] for wait in found["step_waits"]}
    assert files == {"distributed/ranks.py", "metrics/step_metrics.py", *once}
    page = (Path(__file__).resolve().parents[4] / "docs/sizing.md").read_text(encoding="utf-8")
    named = files | {each.split()[0] for each in before}
    assert not [name for name in named if f"`{name}`" not in page]


@MORE
def test_gathered_weights_that_are_kept_are_gathered_once(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, hidden=128, layers=12)
    freed, kept = (rehearse_apart(configuration(model, parallel={"reshard": reshard}), 2) for reshard in (True, False))
    sent = [sum(each["sent"] for each in found["traffic"] if each["kind"] == "all-gather") for found in (freed, kept)]
    assert 0.45 < sent[1] / sent[0] < 0.6
    assert kept["temporary"] + kept["activations"] > freed["temporary"] + freed["activations"]


@MORE
def test_a_mixture_whose_routers_replay_choices_has_the_flops_of_one_that_chooses(tmp_path: Path) -> None:
    build_mixture().save_pretrained(tmp_path)
    chosen, replayed = (rehearse_apart(configuration(tmp_path, router_replay=replay), 2) for replay in (False, True))
    assert chosen["flops"] == replayed["flops"]
    assert replayed["activations"] > 0


def test_a_model_of_known_size_is_shared_out_evenly(tmp_path: Path) -> None:
    # Of Qwen2.5-7B the widths, and 2 of its 28 layers.
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_7B, "num_hidden_layers": 2}))
    found = rehearse_apart(configuration(tmp_path), 8)
    layer = 2 * 3584 * 3584 + 3584 + 2 * (3584 * 512 + 512) + 3 * 3584 * 18944 + 2 * 3584
    whole = 2 * 152064 * 3584 + 3584
    assert found["model_parameters"] == whole + 2 * layer
    assert whole + 28 * layer == 7_615_616_512
    assert found["gradients"] == pytest.approx(4 * found["model_parameters"] / 8, rel=1e-3)
    assert found["optimizer"] == pytest.approx(2 * found["gradients"], rel=1e-3)
    # Two for each weight and token forward, four backward, without embeddings; the output layer's loss tokens twice.
    body = 2 * layer * found["tokens"] * found["micro_batches"]
    assert found["flops"] > 6 * body


def engine(folder: Path, settings: dict[str, Any], longest: int = 256, **args: Any) -> EngineSize:
    (folder / "config.json").write_text(json.dumps(settings))
    config = configuration(folder)
    model = config.model.model_copy(update={"max_length": longest})
    generator = config.generator.model_copy(update={"args": args})
    pools = {"": config.model_copy(update={"model": model, "generator": generator})}
    return size_engines(pools, 7_615_616_512, CARDS["h100"].memory, shared=False)[""]


def test_an_engine_has_keys_and_values_of_each_layer(tmp_path: Path) -> None:
    found = engine(tmp_path, QWEN_7B)
    assert found.token == 2 * 28 * 4 * 128 * 4
    assert found.weights == 4 * 7_615_616_512
    assert found.samples is not None
    assert found.samples > 100
    assert engine(tmp_path, QWEN_7B, tensor_parallel_size=8).token == 2 * 28 * 128 * 4
    assert engine(tmp_path, QWEN_7B, pipeline_parallel_size=2).token == 2 * 14 * 4 * 128 * 4
    copies = engine(tmp_path, QWEN_7B, data_parallel_size=2)
    assert (copies.token, copies.weights, copies.samples) == (found.token, found.weights, 2 * found.samples)


def test_a_window_keeps_no_more_than_its_tokens(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 7
    windows = {**QWEN_7B, "use_sliding_window": True, "sliding_window": 128, "layer_types": kinds}
    of_layer = 2 * 4 * 128 * 4
    assert engine(tmp_path, windows, 1024).token == (21 * 128 + 7 * 1024) * of_layer // 1024
    assert engine(tmp_path, windows, 64).token == 28 * of_layer
    mistral = {**QWEN_7B, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 128}
    assert engine(tmp_path, mistral, 1024).token == 28 * 128 * of_layer // 1024
    states = {**windows, "layer_types": ["linear_attention"] * 28}
    assert engine(tmp_path, states).samples is None


def test_latent_attention_keeps_a_latent_and_a_key_on_every_rank(tmp_path: Path) -> None:
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 27, "num_key_value_heads": 16}
    latent = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], **sizes}
    for tensor in (1, 4):
        assert engine(tmp_path, latent, tensor_parallel_size=tensor).token == 27 * (512 + 64) * 4


@pytest.mark.parametrize(
    ("generator", "shared", "share"),
    [
        ({}, False, 0.9),
        ({}, True, 0.4),
        ({"replicas": 2}, True, 0.2),
        ({"args": {"gpu_memory_utilization": 0.6}}, True, 0.6),
        ({"engine": "transformers"}, True, 0.0),
    ],
)
def test_vllm_takes_its_share_of_a_card_that_it_shares(
    tmp_path: Path, generator: dict[str, Any], shared: bool, share: float
) -> None:
    config = configuration(tmp_path)
    pools = {"": config.model_copy(update={"generator": config.generator.model_copy(update=generator)})}
    assert vllm_shares(pools, shared) == {"": share}
    memory = CARDS["h100"].memory
    taken = share * generator.get("replicas", 1) if shared else 0
    assert trainer_room(pools, memory, shared) == pytest.approx(memory * (USABLE - taken), abs=2)


def test_the_trainer_gets_the_cards_that_generators_leave(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    assert trainer_ranks(config, 8) == 7
    assert trainer_ranks(configuration(tmp_path, parallel={"tensor": 2}), 8) == 6
    assert trainer_ranks(configuration(tmp_path, processes=4), 8) == 4
    assert trainer_ranks(config, 1) == 1
    with pytest.raises(ConfigError, match="--gpus 4 is too few"):
        trainer_ranks(configuration(tmp_path, processes=4), 4)


def test_a_placement_says_which_cards_the_trainer_has(tmp_path: Path) -> None:
    config = configuration(tmp_path)

    def placed(trainer: str, generator: str) -> TidemillConfig:
        return config.model_copy(update={"placement": PlacementConfig(trainer=trainer, generator=generator)})

    assert trainer_ranks(placed("0-7", "0-7"), 8) == 8
    assert trainer_ranks(placed("0-5", "0-7"), 8) == 6
    assert trainer_ranks(placed("0", "0"), 1) == 1
    assert 1 <= trainer_ranks(placed("auto", "auto"), 8) <= 8
    with pytest.raises(ConfigError, match="--gpus 8 is too few: placement names GPU 8, counted from 0"):
        trainer_ranks(placed("0-7", "8"), 8)


def test_generators_of_pools_have_cards_and_sizes_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    values = dump_config(configuration(tmp_path))
    wide = {"generator": {"args": {"tensor_parallel_size": 4}}}
    small = {"generator": {"replicas": 2, "engine": "transformers"}}
    config = parse_config({**values, "pools": {"wide": wide, "small": small}})
    assert trainer_ranks(config, 8) == 2
    with pytest.raises(ConfigError, match=r"--gpus 6 is too few: .* and the generators 6"):
        trainer_ranks(config, 6)
    copies = {"generator": {"args": {"tensor_parallel_size": 2, "data_parallel_size": 2}}}
    assert trainer_ranks(parse_config({**values, "pools": {"wide": copies, "small": small}}), 8) == 2
    found = size_engines(by_pool(config), 7_615_616_512, CARDS["h100"].memory, shared=False)
    assert found["wide"].token == 2 * 28 * 128 * 4
    assert found["small"].token == 2 * 28 * 4 * 128 * 4
    assert found["small"].weights == 4 * found["wide"].weights


def test_an_unknown_card_is_refused_by_name(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match=r"--gpu 'h300' is not known, must be one of a100-40, .*h200"):
        fit(configuration(tmp_path), 8, "h300")


def test_the_time_of_a_step_is_that_of_its_slowest_part() -> None:
    card, within = (
        CARDS["h100"],
        {"dimension": "shard", "kind": "all-gather", "size": 8, "overlaps": True, "sent": 10**9},
    )
    # A product of a TFLOP, and an operator that moves a terabyte ten times.
    work = {"operators": [(10**12, 10**6, 1), (10**6, 10**12, 10)], "traffic": [{**within, "span": 8}]}
    alone = step_time(work, card, find_links(None, "h100"))
    assert alone.arithmetic == pytest.approx(1 / (989 * ARITHMETIC) + 10 / (3.35 * BANDWIDTH))
    assert alone.sharding == pytest.approx(1 / (450 * TRANSFER))
    assert alone.total == alone.arithmetic
    apart = {**within, "span": 16, "sent": 10**13}
    across = step_time({**work, "traffic": [apart]}, card, find_links("nvlink,ib400", "h100"))
    assert across.total == across.sharding == pytest.approx(10**4 / (50 * TRANSFER))
    waited = step_time({**work, "traffic": [{**apart, "overlaps": False}]}, card, find_links("nvlink,ib400", "h100"))
    assert waited.total == pytest.approx(alone.arithmetic + across.sharding)


@pytest.mark.parametrize("link", ["ib401", "nvlink,ib401", "ib401,ib400"])
def test_an_unknown_link_is_refused_with_the_known_ones(link: str) -> None:
    with pytest.raises(ConfigError, match=r"--link 'ib401' is not known for h100, must be one of nvlink, .*ib800"):
        find_links(link, "h100")
    with pytest.raises(ConfigError, match=r"--link 'nvlink' is not known for l4, must be one of pcie3, "):
        find_links("nvlink", "l4")


def test_a_search_tries_the_layouts_that_a_model_allows(tmp_path: Path) -> None:
    # 28 heads, 4 of keys and values: tensor up to 4, context up to 4 (28 heads), both in one machine.
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    texts = [change.text for change in layouts(configuration(tmp_path), 8)]
    assert "all ranks shard" in texts
    assert "trainer.parallel.tensor=4" in texts
    assert "trainer.parallel.tensor=2 trainer.parallel.context=2" in texts
    assert not any("tensor=8" in text or "replicate" in text or "expert" in text for text in texts)
    assert any("replicate=2" in change.text for change in layouts(configuration(tmp_path), 16))


def test_a_search_names_the_fastest_layout_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_7B, "num_hidden_layers": 1, "vocab_size": 1024}))
    config = configuration(tmp_path, processes=2)
    printed: list[str] = []
    monkeypatch.setattr(typer, "echo", printed.append)
    found = fit(config, 3, "h100", search=True, quiet=True)
    answer = json.loads(json.dumps(as_json(found)))
    rows = answer["layouts"]
    assert {row["layout"] for row in rows} == {
        "all ranks shard",
        "trainer.parallel.tensor=2",
        "trainer.parallel.context=2",
    }
    assert all(row["left"] > 0 for row in rows)
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    size, card = answer["trainer"], CARDS["h100"]
    assert answer["trained_tokens_per_s"] == size["tokens"] * size["micro_batches"] / size["seconds"]["total"]
    # 64 samples, half as long as the longest, and the weights once, from memory for each token of all.
    engine = answer["engines"][""]
    read = engine["weights"] + 64 * engine["token"] * 256 / 2
    assert config.generator.max_samples == 64
    assert engine["rate"] == pytest.approx(64 * card.tbps * 1e12 * BANDWIDTH / read)
    # A split takes both rates, where the run has measured none.
    split = plan(config, 3, None, None, None, as_json=True, computed=found.rates)
    assert split["rates"]["trained_tokens_per_s"] == found.trained
    assert {split["sources"][name] for name in ("trained", "sampled")} == {"computed, not measured"}
    known = figures(config, computed=found.rates).rates
    assert known.sampled_tokens_per_s() == pytest.approx(engine["rate"])
    given = plan(config, 3, 5.0, None, None, as_json=True, computed=found.rates)
    assert (given["rates"]["trained_tokens_per_s"], given["sources"]["trained"]) == (5.0, "given")
    assert printed == []
    plot_memory(found, "a model", tmp_path / "memory.png")
    height, width = imread(tmp_path / "memory.png").shape[:2]
    assert width == 1650
    assert height > 300
