"""Exports of drafters: exact files in both forms, what is read and what is refused, and a check that really fails."""

import copy
import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import arguments, load
from pipeline_runner import REPOSITORY, SMALL, Case, run_cases
from safetensors.torch import load_file, save_file

import train_dflash_pipeline as pipeline
from train_dflash_pipeline import DFlashDrafter, DrafterConfig, UserError, load_drafter

sys.path.insert(0, str(REPOSITORY / "tools"))
import export_drafter as tool
from check_pipeline_equiv import write_small_data

FULL, SLIDING = "full_attention", "sliding_attention"
CPU = torch.device("cpu")


def drafter_config(layer_types=(SLIDING, FULL), **changes) -> DrafterConfig:
    """A drafter for the random targets of conftest.py: 8 layers, 320 tokens."""
    values = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=len(layer_types), num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-6, rope_theta=5e5, max_position_embeddings=512,
        vocab_size=320, block_size=4, mask_token_id=319, target_layer_ids=(1, 3, 6), num_target_layers=8,
        layer_types=tuple(layer_types), sliding_window=12 if SLIDING in layer_types else 2048,
    )  # fmt: skip
    return DrafterConfig(**values | changes)


def random_drafter(config: DrafterConfig) -> DFlashDrafter:
    """No weight keeps its initial value, so that each takes part in what is computed."""
    drafter = DFlashDrafter(config, seed=0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return drafter


def write_checkpoint(folder, drafter: DFlashDrafter, target: str, target_dtype="float32"):
    """A run's folder as training leaves it, without the optimizer. Returns it."""
    step = folder / "checkpoints" / "step-000007"
    (step / "drafter").mkdir(parents=True)
    (folder / "checkpoints" / "latest").write_text(step.name)
    save_file(drafter.state_dict(), step / "drafter" / "model.safetensors")
    pipeline.write_json(step / "drafter" / "config.json", drafter.config.to_json() | {"dtype": "float32"})
    flags = arguments(target=target, target_dtype=target_dtype).flat()
    known = target if target in pipeline.RANDOM_TARGETS else pipeline.target_hashes(target)
    pipeline.write_json(step / "state.json", {"step": 7, "arguments": flags, "identity": {"data": "abc", "target": known}})
    return folder


@pytest.fixture
def export(tmp_path, target_folder, monkeypatch, capsys):
    """export(drafter or run folder, form, *flags, kind='qwen3') -> (exported folder, what was printed)."""

    def call(source, form, *flags, kind="qwen3", name="out"):
        if isinstance(source, DFlashDrafter):
            number = len(list(tmp_path.glob("run*")))
            source = write_checkpoint(tmp_path / f"run{number}", source, target_folder(kind))
        command = ["export_drafter.py", source, "--format", form, "--output-dir", tmp_path / name, *flags]
        monkeypatch.setattr(sys, "argv", [str(word) for word in command])
        tool.main()
        return tmp_path / name, capsys.readouterr().out

    return call


def read_config(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


# ---- What is written ----


def test_zlab_config_exactly(export):
    folder, _ = export(random_drafter(drafter_config()), "zlab")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "export.json", "model.safetensors"]
    assert read_config(folder) == {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dtype": "bfloat16",
        "block_size": 4, "num_target_layers": 8,
        "dflash_config": {"mask_token_id": 319, "target_layer_ids": [1, 3, 6], "block_size": 4},
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "vocab_size": 320,
        "max_position_embeddings": 512, "hidden_act": "silu", "initializer_range": 0.02, "attention_bias": False,
        "attention_dropout": 0.0, "tie_word_embeddings": False, "use_cache": True,
        "rope_theta": 5e5, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "layer_types": [SLIDING, FULL], "use_sliding_window": True, "sliding_window": 12, "max_window_layers": 0,
        "sample_from_anchor": False, "bos_token_id": None, "eos_token_id": 1,
    }  # fmt: skip


def test_zlab_config_without_a_window(export):
    written = read_config(export(random_drafter(drafter_config([FULL, FULL])), "zlab")[0])
    assert written["layer_types"] == [FULL, FULL] and written["max_window_layers"] == 2
    assert written["sliding_window"] is None and written["use_sliding_window"] is False


def test_speculators_config_exactly(export, target_folder):
    """Layer ids count the embedding, so each is one higher than in the other form."""
    folder, _ = export(random_drafter(drafter_config([SLIDING, SLIDING])), "speculators")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "export.json", "model.safetensors"]
    assert read_config(folder) == {
        "speculators_model_type": "dflash", "speculators_version": "0.9.0", "architectures": ["DFlashDraftModel"],
        "tie_word_embeddings": False, "block_size": 4, "draft_vocab_size": 320, "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [2, 4, 7], "mask_token_id": 319, "sliding_window_non_causal": False,
        "sample_from_anchor": False, "dtype": "bfloat16",
        "transformer_layer_config": {
            "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None,
            "eos_token_id": 1, "pad_token_id": None, "head_dim": 8, "hidden_act": "silu", "hidden_size": 32,
            "initializer_range": 0.02, "intermediate_size": 48, "layer_types": [SLIDING, SLIDING],
            "max_position_embeddings": 512, "max_window_layers": 0, "num_attention_heads": 4, "num_hidden_layers": 2,
            "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "sliding_window": 12,
            "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": True, "vocab_size": 320,
        },
        "speculators_config": {
            "algorithm": "dflash", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1,
                                  "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": target_folder("qwen3"), "architectures": ["Qwen3ForCausalLM"]},
        },
    }  # fmt: skip


@pytest.mark.parametrize("layer_types, said", [([FULL, FULL], True), ([SLIDING, FULL], False)])
def test_speculators_says_of_full_layers_that_they_are_not_causal(export, layer_types, said):
    assert read_config(export(random_drafter(drafter_config(layer_types)), "speculators")[0])[
        "sliding_window_non_causal"
    ] is said  # fmt: skip


@pytest.mark.parametrize("kind", ["qwen3", "llama-tied"])
def test_tensors_of_both_forms(export, target_folder, kind):
    """z-lab: the drafter alone. speculators: with copies of the target's embedding and head, tied or not."""
    drafter = random_drafter(drafter_config())
    body = {name: weight.bfloat16() for name, weight in drafter.state_dict().items()}
    zlab = load_file(export(drafter, "zlab", kind=kind, name="z")[0] / "model.safetensors")
    speculators = load_file(export(drafter, "speculators", kind=kind, name="s")[0] / "model.safetensors")
    _, model = load(target_folder(kind))
    copies = {"embed_tokens.weight": model.get_input_embeddings(), "lm_head.weight": model.get_output_embeddings()}
    for written, expected in (
        (zlab, body), (speculators, body | {name: module.weight.bfloat16() for name, module in copies.items()})
    ):  # fmt: skip
        assert written.keys() == expected.keys()
        assert all(written[k].dtype == torch.bfloat16 and torch.equal(written[k], expected[k]) for k in expected)


def test_record_of_the_target(export, target_folder):
    """Name, dtypes, block layout; the hash notices one changed norm."""
    drafter = random_drafter(drafter_config())
    folder, printed = export(drafter, "zlab")
    record = json.loads((folder / "export.json").read_text())
    assert (record["step"], record["data"], record["dtype"], record["format"]) == (7, "abc", "bfloat16", "zlab")
    assert "sample_from_anchor false" in record["block_layout"] and "warning" not in printed
    target = record["target"]
    assert (target["name"], target["dtype"], target["trained_on"]) == (target_folder("qwen3"), "float32", "float32")

    tuned = folder.parent / "tuned"
    config, model = load(target_folder("qwen3"))
    model.model.layers[2].self_attn.k_norm.weight[3] += 0.01
    model.save_pretrained(tuned)
    other, printed = export(drafter, "zlab", "--target", tuned, name="tuned-out")
    record = json.loads((other / "export.json").read_text())
    assert record["target"]["weights_sha256"] != target["weights_sha256"]
    assert f"warning: trained on states of {target['name']}, exported for {tuned}" in printed


def test_dtype_of_the_target_in_training_is_compared(export, tmp_path, target_folder):
    run = write_checkpoint(tmp_path / "run", random_drafter(drafter_config()), target_folder("qwen3"), "bfloat16")
    _, printed = export(run, "zlab")
    assert "warning: trained on bfloat16 states, the target's checkpoint is float32" in printed


def test_commands_that_serve(export, target_folder):
    drafter, target = random_drafter(drafter_config([FULL])), target_folder("qwen3")
    folder, printed = export(drafter, "zlab", name="a folder")
    vllm = (
        f"""  vllm serve {target} --speculative-config '{{"method": "dflash", "model": "{folder}", """
        """"num_speculative_tokens": 3}' --attention-backend flash_attn --max-num-batched-tokens 32768\n"""
    )
    sglang = (
        f"  python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path '{folder}' --speculative-num-draft-tokens 4\n"
    )
    assert vllm in printed and sglang in printed
    assert "prefix cache off" in printed and "a fault\nof the serving" in printed
    _, printed = export(random_drafter(drafter_config()), "speculators", name="mixed")
    assert "  VLLM_USE_V2_MODEL_RUNNER=1 vllm serve " in printed and "sglang" not in printed
    assert "warning: some vLLM releases" in printed


# ---- Round trips ----


@pytest.mark.parametrize("layer_types", [(FULL, FULL), (SLIDING, SLIDING), (SLIDING, FULL)])
@pytest.mark.parametrize("form", ["zlab", "speculators"])
def test_round_trip_is_bit_exact(export, form, layer_types):
    drafter = random_drafter(drafter_config(layer_types))
    folder, _ = export(drafter, form, "--dtype", "float32")
    again = load_drafter(folder, CPU, torch.float32, num_target_layers=8)
    assert again.config == drafter.config
    assert all(torch.equal(again.state_dict()[name], weight) for name, weight in drafter.state_dict().items())


def test_one_form_from_the_other(export):
    drafter = random_drafter(drafter_config())
    direct, _ = export(drafter, "zlab", name="direct")
    detour, _ = export(export(drafter, "speculators", name="s")[0], "zlab", name="detour")
    for name in ("config.json", "model.safetensors", "export.json"):
        assert (direct / name).read_bytes() == (detour / name).read_bytes()


def test_depth_of_the_target_comes_from_the_caller_where_the_form_is_silent(export):
    folder, _ = export(random_drafter(drafter_config()), "speculators")
    assert load_drafter(folder, CPU, torch.float32).config.num_target_layers is None
    with pytest.raises(UserError, match="the target has layers 0 to 5"):
        load_drafter(folder, CPU, torch.float32, num_target_layers=6)
    with pytest.raises(UserError, match="target of 8 layers, this one has 9"):
        DrafterConfig.from_json(drafter_config().to_json(), 9)


# ---- Forms that others write ----


def changed(values: dict, changes: dict) -> dict:
    """A copy with some keys set, by dotted path; the value `...` removes one."""
    values = copy.deepcopy(values)
    for path, value in changes.items():
        *parents, key = path.split(".")
        place = values
        for parent in parents:
            place = place[parent]
        if value is ...:
            del place[key]
        else:
            place[key] = value
    return values


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": ...},
        {"dflash_config.block_size": ...},
        {"rope_parameters": ...},
        {"rope_theta": ..., "rope_scaling": ...},
        {"rope_theta": 500000, "rope_parameters": None},
        {"rope_parameters.partial_rotary_factor": 1.0},
        {"torch_dtype": "bfloat16", "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}},
        {"architectures": ["Qwen3DFlashDraftModel"]},
        {"dflash_config.mask_token": "<|MASK|>", "dflash_config.projector_type": "dflash"},
        {"draft_vocab_size": 320, "target_hidden_size": 32, "final_logit_softcapping": None},
    ],
)
def test_other_writers_of_the_zlab_form(changes):
    config = drafter_config()
    assert DrafterConfig.from_json(changed(config.to_json(), changes)) == config


def test_explicit_causality():
    """NeMo AutoModel states that full layers are not causal; ModelOpt slides all layers by a flag of its own."""
    full, sliding = drafter_config([FULL, FULL]), drafter_config([SLIDING, SLIDING])
    assert DrafterConfig.from_json(full.to_json() | {"is_causal": False}) == full
    modelopt = {"dflash_config.use_swa": True, "dflash_config.swa_window_size": 12, "dflash_config.causal": True,
                "sliding_window": 12}  # fmt: skip
    assert DrafterConfig.from_json(changed(full.to_json(), modelopt)) == sliding
    with pytest.raises(UserError, match="dflash_config.causal False"):
        DrafterConfig.from_json(changed(full.to_json(), modelopt | {"dflash_config.causal": False}))


REFUSED = [
    ({"attention_bias": True}, "attention_bias True"),
    ({"hidden_act": "gelu"}, "hidden_act gelu"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type yarn"),
    ({"rope_parameters.rope_type": "llama3"}, "rope_parameters.rope_type llama3"),
    ({"rope_parameters.partial_rotary_factor": 0.25}, "rope_parameters.partial_rotary_factor 0.25"),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
    ({"rope_theta": 1e6}, "rope_theta of the drafter contradicts itself: 1000000.0 and 500000.0"),
    ({"rope_theta": ..., "rope_parameters": ...}, "has no 'rope_theta'"),
    ({"sample_from_anchor": True}, "sample_from_anchor True"),
    ({"dflash_config.sample_from_anchor": True}, "dflash_config.sample_from_anchor True"),
    ({"draft_vocab_size": 64}, "draft_vocab_size 64"),
    ({"target_hidden_size": 64}, "target_hidden_size 64"),
    ({"dflash_config.projector_type": "domino"}, "dflash_config.projector_type domino"),
    ({"dflash_config.gru_hidden_dim": 64}, "dflash_config.gru_hidden_dim 64"),
    ({"dflash_config.conv_kernel_size": 4}, "dflash_config.conv_kernel_size 4"),
    ({"dflash_config.attention_mode": "mla"}, "dflash_config.attention_mode mla"),
    ({"selector_top_k": 8}, "selector_top_k 8"),
    ({"dflash_config.shift_label": True}, "dflash_config.shift_label True"),
    ({"dflash_config.attention_sink_bias": True}, "dflash_config.attention_sink_bias True"),
    ({"dflash_config.something_new": 1}, "dflash_config.something_new 1"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"is_neox_style": False}, "is_neox_style False"),
    ({"is_causal": False}, "is_causal False of the drafter with a layer of sliding_attention"),
    ({"dflash_config.causal": True}, "dflash_config.causal True of the drafter with a layer of full_attention"),
    ({"dflash_config.swa_window_size": 99}, "window of the drafter contradicts itself: 99 and 12"),
    ({"use_sliding_window": False}, "use_sliding_window"),
    ({"dflash_config.mask_token_id": ...}, "has no 'mask_token_id'"),
    ({"dflash_config.mask_token_id": 320}, "mask_token_id 320 of the drafter lies outside"),
    ({"dflash_config.mask_token_id": -1}, "mask_token_id -1"),
    ({"dflash_config.target_layer_ids": [1, 3, 3]}, "target_layer_ids"),
    ({"dflash_config.target_layer_ids": [3, 1, 6]}, "target_layer_ids"),
    ({"dflash_config.target_layer_ids": [1, 3, 8]}, "the target has layers 0 to 7"),
    ({"dflash_config.target_layer_ids": []}, "target_layer_ids"),
    ({"dflash_config.target_layer_ids": [-1, 3]}, "target_layer_ids"),
    ({"dflash_config.block_size": 8}, "block_size of the drafter contradicts itself: 4 and 8"),
    ({"dflash_config.block_size": 1, "block_size": 1}, "block_size 1"),
    ({"layer_types": [SLIDING]}, "layer_types"),
    ({"layer_types": [SLIDING, "chunked_attention"]}, "chunked_attention"),
    ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
    ({"head_dim": 0}, "head_dim 0"),
    ({"hidden_size": "32"}, "hidden_size 32"),
    ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM"),
    ({"architectures": ["DSparkDraftModel"]}, "DSparkDraftModel"),
    ({"architectures": ...}, "architectures"),
]  # fmt: skip


@pytest.mark.parametrize("changes, message", REFUSED, ids=[message for _, message in REFUSED])
def test_what_this_drafter_does_not_compute_is_refused_by_name(changes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        DrafterConfig.from_json(changed(drafter_config().to_json(), changes))


def speculators_json(layer_types=(SLIDING, FULL)) -> dict:
    target = SimpleNamespace(architectures=["Qwen3ForCausalLM"], get_text_config=lambda: SimpleNamespace())
    return tool.speculators_config(drafter_config(layer_types), "some/target", target, "bfloat16")


@pytest.mark.parametrize("changes, message", [
    ({"speculators_model_type": "eagle3"}, "speculators_model_type eagle3"),
    ({"transformer_layer_config": ...}, "has no 'transformer_layer_config'"),
    ({"aux_hidden_state_layer_ids": None}, "has no 'aux_hidden_state_layer_ids'"),
    ({"aux_hidden_state_layer_ids": [0, 4, 7]}, "holds 0"),
    ({"aux_hidden_state_layer_ids": [2, "4", 7]}, "ids must be whole"),
    ({"aux_hidden_state_layer_ids": [4, 2, 7]}, "target_layer_ids [3, 1, 6]"),
    ({"sliding_window_non_causal": True}, "sliding_window_non_causal true"),
    ({"sample_from_anchor": True}, "sample_from_anchor True"),
    ({"draft_vocab_size": 64}, "draft_vocab_size 64"),
    ({"target_hidden_size": 64}, "target_hidden_size 64"),
    ({"mask_token_id": None}, "has no 'mask_token_id'"),
    ({"block_size": ...}, "has no 'block_size'"),
    ({"transformer_layer_config.attention_bias": True}, "attention_bias True"),
    ({"transformer_layer_config.rope_parameters.rope_type": "yarn"}, "rope_parameters.rope_type yarn"),
    ({"transformer_layer_config.hidden_act": "gelu"}, "hidden_act gelu"),
])  # fmt: skip
def test_speculators_forms_that_are_refused(changes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        DrafterConfig.from_json(changed(speculators_json(), changes), 8)


def test_speculators_variants_that_are_read():
    config = drafter_config([FULL, FULL])
    for changes in ({}, {"sliding_window_non_causal": False}, {"sliding_window_non_causal": ...},
                    {"architectures": ["DFlashSpeculator"], "sample_from_anchor": ...}):  # fmt: skip
        assert DrafterConfig.from_json(changed(speculators_json([FULL, FULL]), changes), 8) == config


# ---- Weights that are refused ----


def rewrite(folder, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize("form, change, message", [
    ("zlab", lambda w: w.pop("fc.weight"), "tensor fc.weight is missing"),
    ("zlab", lambda w: w.update(t2d=torch.ones(320)), "tensor t2d is not one of a DFlash drafter"),
    ("zlab", lambda w: w.update({"embed_tokens.weight": torch.ones(320, 32)}), "embed_tokens.weight is not one of"),
    ("zlab", lambda w: w.update({"norm.weight": torch.ones(32, 1)}), "norm.weight is torch.float32 [32, 1]"),
    ("zlab", lambda w: w.update({"norm.weight": torch.ones(32).to(torch.int8)}), "norm.weight is torch.int8"),
    ("speculators", lambda w: w.update(d2t=torch.ones(64)), "tensor d2t is not one of"),
    ("speculators", lambda w: w.update({"verifier_norm.weight": torch.ones(32)}), "verifier_norm.weight is not one of"),
    ("speculators", lambda w: w.update({"lm_head.weight": torch.ones(64, 32)}), "lm_head.weight has shape (64, 32)"),
])  # fmt: skip
def test_wrong_tensors_are_named(export, form, change, message):
    folder, _ = export(random_drafter(drafter_config()), form)
    rewrite(folder, change)
    with pytest.raises(UserError, match=re.escape(message)):
        load_drafter(folder, CPU, torch.float32)


def test_sharded_weights_and_missing_copies_are_read(export):
    """Newer speculators releases leave out the copies of a full vocabulary; large drafters come in shards."""
    drafter = random_drafter(drafter_config())
    folder, _ = export(drafter, "speculators", "--dtype", "float32")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    del weights["embed_tokens.weight"], weights["lm_head.weight"]
    names = sorted(weights)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, part in shards.items():
        save_file({name: weights[name] for name in part}, folder / shard)
    index = {name: shard for shard, part in shards.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    again = load_drafter(folder, CPU, torch.float32).state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in drafter.state_dict().items())


def test_torn_file_is_one_line(export):
    folder, _ = export(random_drafter(drafter_config()), "zlab")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match="not a drafter folder"):
        load_drafter(folder, CPU, torch.float32)


@pytest.mark.parametrize("text, complaint", [
    ("[]", "config.json holds no JSON object"), ("{", "config.json cannot be read"), ("[" * 10**5, "config.json cannot be read"),
    (None, "config.json is missing"),
])  # fmt: skip
def test_a_configuration_of_another_kind_is_one_line(export, text, complaint):
    folder, _ = export(random_drafter(drafter_config()), "zlab")
    (folder / "config.json").unlink() if text is None else (folder / "config.json").write_text(text)
    with pytest.raises(UserError, match=f"not a drafter folder .{complaint}"):
        load_drafter(folder, CPU, torch.float32)


# ---- The check of an export ----


def edit_config(**changes):
    changes = {path.replace("__", "."): value for path, value in changes.items()}
    return lambda folder: pipeline.write_json(folder / "config.json", changed(read_config(folder), changes))


def rename_tensor(folder) -> None:
    rewrite(folder, lambda w: w.update({"layers.0.mlp.gate.weight": w.pop("layers.0.mlp.gate_proj.weight")}))


def change_one_value(folder) -> None:
    rewrite(folder, lambda w: w["layers.1.self_attn.k_norm.weight"][3:4].add_(0.25))


TAMPERED = {
    "renamed tensor": ("zlab", rename_tensor, "tensor layers.0.mlp.gate_proj.weight is missing"),
    "one value": ("zlab", change_one_value, "layers.1.self_attn.k_norm.weight: other values"),
    "swapped layer ids": ("zlab", edit_config(dflash_config__target_layer_ids=[3, 1, 6]), "layer ids"),
    "other layer ids": ("zlab", edit_config(dflash_config__target_layer_ids=[1, 4, 6]), "logits differ"),
    "layer ids of the other form": ("speculators", edit_config(aux_hidden_state_layer_ids=[1, 3, 6]), "logits differ"),
    "theta": ("zlab", edit_config(rope_theta=1e6, rope_parameters__rope_theta=1e6), "logits differ"),
    "theta in one place": ("zlab", edit_config(rope_theta=1e6), "rope_theta"),
    "partial rotary factor": ("zlab", edit_config(partial_rotary_factor=0.25), "partial_rotary_factor"),
    "mask token": ("zlab", edit_config(dflash_config__mask_token_id=300), "logits differ"),
    "mask token outside": ("speculators", edit_config(mask_token_id=320), "mask_token_id"),
    "window": ("zlab", edit_config(sliding_window=11), "logits differ"),
    "layer order": ("zlab", edit_config(layer_types=[FULL, SLIDING]), "logits differ"),
    "window flag": ("zlab", edit_config(use_sliding_window=False), "sliding_window"),
    "eps": ("zlab", edit_config(rms_norm_eps=1e-2), "logits differ"),
    "block size": ("zlab", edit_config(block_size=5, dflash_config__block_size=5), "a block gives [5, 320] logits"),
    "heads": ("zlab", edit_config(num_attention_heads=8), "wrong shape"),
    "other block layout": ("zlab", edit_config(sample_from_anchor=True), "sample_from_anchor"),
    "architecture": ("zlab", edit_config(architectures=["DFlashDraftModelX"]), "architectures"),
    "dtype": ("zlab", edit_config(dtype="float16"), "dtype"),
    "missing key": ("zlab", edit_config(layer_types=...), "layer_types"),
    "causality": ("speculators", edit_config(sliding_window_non_causal=True), "sliding_window_non_causal"),
    "token count": ("speculators", edit_config(speculators_config__proposal_methods=[{"speculative_tokens": 4}]),
                    "speculative_tokens"),
}  # fmt: skip


@pytest.mark.parametrize("what", TAMPERED)
def test_the_check_fails_on_a_wrong_export(export, monkeypatch, tmp_path, what):
    """A fault of the writer leaves no folder behind."""
    form, tamper, message = TAMPERED[what]
    right_write = tool.write_folder

    def wrong_write(folder, *rest):
        right_write(folder, *rest)
        tamper(folder)

    monkeypatch.setattr(tool, "write_folder", wrong_write)
    with pytest.raises(UserError, match=re.escape(message)):
        export(random_drafter(drafter_config()), form)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_a_window_within_the_block_passes_the_check(export):
    config = read_config(export(random_drafter(drafter_config(block_size=8, sliding_window=4)), "zlab")[0])
    assert config["sliding_window"] == 4 and config["block_size"] == 8


def test_weights_that_are_not_finite_are_not_exported(export):
    drafter = random_drafter(drafter_config())
    with torch.no_grad():
        drafter.norm.weight[0] = torch.inf
    with pytest.raises(UserError, match="finite weights"):
        export(drafter, "zlab")


def test_activations_beyond_float16_are_named(export):
    drafter = random_drafter(drafter_config())
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "mlp" in name:
                parameter.mul_(100)
    _, printed = export(drafter, "zlab")
    assert "warning: activations exceed float16's range" in printed
    _, printed = export(random_drafter(drafter_config()), "zlab", name="tame")
    assert "range" not in printed


# ---- The command ----


def test_folders_that_are_in_the_way(export, tmp_path):
    drafter = random_drafter(drafter_config())
    (tmp_path / "out").mkdir()
    folder, _ = export(drafter, "zlab")  # empty: taken
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="--overwrite replaces it"):
        export(drafter, "zlab")
    assert (folder / "model.safetensors").read_bytes() == before
    folder, _ = export(drafter, "zlab", "--overwrite", "--dtype", "float32")
    assert read_config(folder)["dtype"] == "float32"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out")) == ["out"]
    (folder / "export.json").unlink()
    with pytest.raises(UserError, match="not an export of this tool"):
        export(drafter, "zlab", "--overwrite")


def test_mistakes_about_the_target(export, tmp_path, target_folder):
    drafter = random_drafter(drafter_config())
    folder = write_checkpoint(tmp_path / "run", drafter, target_folder("qwen3"))
    alone = folder / "checkpoints" / "step-000007" / "drafter"
    alone = alone.rename(tmp_path / "alone")
    with pytest.raises(UserError, match="name it with --target"):
        export(alone, "zlab")
    with pytest.raises(UserError, match="hidden_size 64, the drafter 32"):
        export(alone, "zlab", "--target", "toy")


def test_scaled_embedding_is_refused_or_said(export):
    """Gemma multiplies its embedding; the copies in the speculators form can't say so."""
    drafter = random_drafter(drafter_config())
    with pytest.raises(UserError, match="the speculators form cannot say"):
        export(drafter, "speculators", kind="gemma2")
    _, printed = export(drafter, "zlab", kind="gemma2")
    assert "warning: the server must scale the drafter's embedding by 5.6" in printed
    assert "soft cap" in printed


def test_last_layer_is_warned_about(export):
    _, printed = export(random_drafter(drafter_config(target_layer_ids=(1, 3, 7))), "zlab")
    assert "warning: the last target layer is captured before the final norm" in printed


# ---- Real checkpoints of every ZeRO stage ----


@pytest.fixture(scope="session")
def stages(tmp_path_factory):
    """Runs of one target and two drafters, two steps, the same but for the ZeRO stage."""
    work = tmp_path_factory.mktemp("stages")
    data = ["--train-data", str(write_small_data(work / "train.jsonl"))]
    flags = [*SMALL, *data, "--num-target-ranks", "1", "--max-steps", "2", "--num-full-attention-layers", "1"]
    configs = [str(REPOSITORY / "ds_configs" / f"zero{stage}.json") for stage in range(4)]
    cases = [Case(f"zero{stage}", [*flags, "--deepspeed", config]) for stage, config in enumerate(configs)]
    return {name: result.check_ok().output_dir for name, result in run_cases(3, cases, work / "runs").items()}


def test_every_zero_stage_exports_the_trained_weights(stages, export):
    """Stages 0 to 2 train the same weights bit for bit. Every export holds them: of stages 2 and 3 they are also put
    together from the shards by DeepSpeed's own converter."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    exported = {}
    for name, run in stages.items():
        folder, _ = export(run, "zlab", "--dtype", "float32", name=f"{name}-out")
        exported[name] = load_file(folder / "model.safetensors")
    shapes = {key: weight.shape for key, weight in exported["zero0"].items()}
    untrained = DFlashDrafter(DrafterConfig.from_json(read_config(folder)), seed=0).state_dict()
    for name, weights in exported.items():
        assert {key: weight.shape for key, weight in weights.items()} == shapes
        assert not any(torch.equal(weights[key], untrained[key]) for key in weights), name
    for name in ("zero1", "zero2"):
        assert all(torch.equal(exported[name][key], exported["zero0"][key]) for key in shapes), name
    for name in ("zero2", "zero3"):
        checkpoints = stages[name] / "checkpoints"
        masters = get_fp32_state_dict_from_zero_checkpoint(str(checkpoints), "step-000002")
        assert masters.keys() == shapes.keys()
        assert all(torch.equal(exported[name][key], masters[key]) for key in shapes), name
