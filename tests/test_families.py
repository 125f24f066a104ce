"""Every family of target that is called proven, by five proofs on a tiny random instance saved to disk; and the others.

The reference is the family's own class in transformers: one document at a time, no padding, eager attention, fp32.
The weights are large enough that windows, caps, routing and running states leave their mark.
"""

import functools
import json
import sys
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import transformers
from helpers import arguments, make_documents
from pipeline_runner import REPOSITORY
from safetensors.torch import load_file, save_file

import train_dflash_pipeline as pipeline
from train_dflash_pipeline import HookCapture, Planner, TargetRunner, UserError, byte_tokenizer

sys.path.insert(0, str(REPOSITORY / "tools"))
import export_drafter
from test_export import write_checkpoint

CPU = torch.device("cpu")
LAYERS, CAPTURED = 8, (1, 3, 5)
TEXT = dict(
    vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=512, dtype="float32", bos_token_id=None,
    pad_token_id=None,
    eos_token_id=[256, 259, 260],  # beyond the tokenizer's 259 tokens (some classes add one): no mask tokens
)  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 7e4}
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
SHARED = dict(shared_expert_intermediate_size=16)
QWEN_VISION = dict(depth=LAYERS, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32,
                   num_position_embeddings=16)  # fmt: skip
VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=LAYERS, num_attention_heads=2, image_size=28,
              patch_size=14)  # fmt: skip
GEMMA = dict(sliding_window=8, query_pre_attn_scalar=8, attn_logit_softcapping=None)


@dataclass
class Family:
    """A config class and its settings; of a multimodal wrapper also those of the text model inside."""

    name: str  # of the classes: <name>Config, <name>ForCausalLM
    text: dict = field(default_factory=dict)
    model: str = ""  # the reference's class, where it is another one
    wrapper: str = ""  # the wrapper's config class
    vision: object = None
    tied: bool = False
    scale: float = 1.0  # of the embedding
    cap: float | None = None  # of the logits
    rope_theta: float = 7e4
    intermediate_size: int = 48

    def config(self):
        text = getattr(transformers, f"{self.name}Config")(
            **TEXT | {"rope_parameters": ROPE} | self.text, tie_word_embeddings=self.tied
        )
        if self.intermediate_size == 3 * 32:
            del text.intermediate_size
        if not self.wrapper:
            return text
        whole = {"text_config": text.to_dict(), "vision_config": self.vision, "tie_word_embeddings": self.tied}
        return getattr(transformers, self.wrapper)(**whole, dtype="float32")

    def reference_class(self):
        return getattr(transformers, self.model or f"{self.name}ForCausalLM")


def wrapped(name: str, **settings) -> Family:
    return Family(f"{name}Text", model=f"{name}ForConditionalGeneration", wrapper=f"{name}Config", **settings)


MROPE = {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}}
PARTIAL = {"rope_parameters": ROPE | {"mrope_section": [1, 0, 0], "partial_rotary_factor": 0.25}}
YARN = {"rope_type": "yarn", "rope_theta": 7e4, "factor": 4.0, "original_max_position_embeddings": 128}
SQRT_32 = 32**0.5
FAMILIES = {
    "llama": Family("Llama"),
    "mistral": Family("Mistral", {"sliding_window": 8}),
    "mistral3": Family(
        "Ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}},
        model="Mistral3ForConditionalGeneration", wrapper="Mistral3Config",
        vision=VISION | {"model_type": "pixtral"},
    ),
    "qwen2": Family("Qwen2", dict(use_sliding_window=True, sliding_window=8, max_window_layers=4), tied=True),
    "qwen3": Family("Qwen3", tied=True),
    "qwen3_moe": Family("Qwen3Moe", EXPERTS),
    "qwen3_vl": wrapped("Qwen3VL", text=MROPE, vision=QWEN_VISION | {"deepstack_visual_indexes": [0]}, tied=True),
    "qwen3_5_text": Family("Qwen3_5Text", LINEAR | PARTIAL, model="Qwen3_5ForCausalLM"),
    "qwen3_5": wrapped("Qwen3_5", text=LINEAR | PARTIAL, vision=QWEN_VISION, tied=True),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeText", LINEAR | PARTIAL | EXPERTS | SHARED, model="Qwen3_5MoeForCausalLM", intermediate_size=96
    ),
    "qwen3_5_moe": wrapped(
        "Qwen3_5Moe", text=LINEAR | PARTIAL | EXPERTS | SHARED, vision=QWEN_VISION, intermediate_size=96
    ),
    "gpt_oss": Family(
        "GptOss", dict(sliding_window=8, num_local_experts=4, num_experts_per_tok=2, rope_parameters=YARN)),
    "gemma2": Family("Gemma2", GEMMA | dict(attn_logit_softcapping=1.0, final_logit_softcapping=3.0), tied=True,
                     scale=SQRT_32, cap=3.0),
    "gemma3_text": Family(
        "Gemma3Text", GEMMA | dict(final_logit_softcapping=3.0, rope_parameters={
            "sliding_attention": ROPE | {"rope_theta": 1e2}, "full_attention": ROPE}),
        model="Gemma3ForCausalLM", tied=True, scale=SQRT_32, cap=3.0),
    "gemma3": wrapped(
        "Gemma3", text=GEMMA | dict(layer_types=["sliding_attention", "full_attention"] * 4, rope_parameters={
            "sliding_attention": ROPE | {"rope_theta": 1e2}, "full_attention": ROPE}),
        vision=VISION | {"model_type": "siglip_vision_model"}, tied=True, scale=SQRT_32),
}  # fmt: skip
every_family = pytest.mark.parametrize("kind", FAMILIES)


def randomise(model) -> None:
    """No weight keeps its initial value; running states decay slowly, so that one left over would show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
            if name.endswith("A_log"):
                parameter.fill_(-4.0)


def save_random(model, folder) -> str:
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


class Target:
    """A saved tiny target: as the pipeline reads it, and its reference."""

    def __init__(self, kind: str, folder):
        self.family = FAMILIES[kind]
        torch.manual_seed(0)
        reference_class = self.family.reference_class()
        self.reference = reference_class._from_config(self.family.config(), attn_implementation="eager").eval()
        randomise(self.reference)
        self.folder = save_random(self.reference, folder)
        self.args = arguments(target=self.folder, target_dtype="float32", num_fc_layers=3, num_draft_layers=2,
                              tokens_per_micro_batch=160, anchors_per_micro_batch=4)  # fmt: skip
        self.config = pipeline.load_target_config(self.args.target)

    @functools.cached_property
    def runner(self) -> TargetRunner:
        return TargetRunner(pipeline.load_target(self.args.target, self.config, CPU), CAPTURED, True, CPU)

    @functools.cached_property
    def ends(self):
        return pipeline.load_frozen_ends(self.args.target, self.config, CPU, torch.float32)

    def drafter_config(self):
        tokenizer = pipeline.load_tokenizer(self.args.target)
        return pipeline.choose_drafter_config(self.args, self.config.get_text_config(), tokenizer)

    def rows(self, documents) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(captured rows [length, K*H], rows of the last layer [length, H]) of each document, from padded batches."""
        plan = Planner(documents, self.args, 1).plan(0)
        assert len(plan.lengths) == len(documents)
        shots = self.runner.forward(plan)
        assert any(passed.stop - passed.start > 1 for _, passed in shots)  # so there is padding
        parts = [shot.get_hidden_states_packed(plan.lengths[passed]) for shot, passed in shots]
        hidden, last = (torch.cat([part[j][0] for part in parts]) for j in (0, 1))
        ids = torch.from_numpy(plan.document_ids[: plan.num_tokens])
        places = [int(np.flatnonzero(plan.documents == d)[0]) for d in range(len(documents))]
        return [hidden[ids == place] for place in places], [last[ids == place] for place in places]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return functools.cache(lambda kind: Target(kind, tmp_path_factory.mktemp(kind)))


def tokens_of(documents, i) -> torch.Tensor:
    return torch.from_numpy(documents.token_ids[documents.offsets[i] : documents.offsets[i + 1]]).long()[None]


# The five proofs ------------------------------------------------------------------------------------------------------


@torch.no_grad()
@every_family
def test_1_captures_are_the_familys_own_hidden_states(kind, target):
    """Of each document alone; the same bits by hooks on the reference, within rounding from the pipeline's batches. No
    later layer writes into what a hook kept."""
    target, documents = target(kind), make_documents([40, 1, 30, 12, 29, 3])
    reference, (rows, last) = target.reference, target.rows(documents)
    hooks, clones = HookCapture(reference, CAPTURED, LAYERS - 1), {}
    cloning = [layer.register_forward_hook(lambda m, x, y, j=j: clones.update({j: (y[0] if isinstance(y, tuple) else y).clone()}))
               for j, layer in enumerate(pipeline.decoder_layers(reference))]  # fmt: skip
    for i in range(len(documents)):
        states = reference(tokens_of(documents, i), output_hidden_states=True).hidden_states
        assert len(states) == LAYERS + 1
        captured = hooks.take().captured
        assert all(torch.equal(captured[j], states[j + 1]) for j in CAPTURED)
        assert all(torch.equal(rows, clones[j]) for j, rows in captured.items())
        assert not any(torch.equal(captured[j], states[j]) for j in CAPTURED)
        assert torch.equal(reference.get_decoder().norm(captured[LAYERS - 1]), states[-1])
        assert not torch.allclose(captured[LAYERS - 1], states[-1], atol=1e-2)
        alone = torch.cat([states[j + 1][0] for j in CAPTURED], 1)
        torch.testing.assert_close(rows[i], alone, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(target.ends.norm(last[i]), states[-1][0], atol=1e-4, rtol=1e-4)
    hooks.remove()
    for hook in cloning:
        hook.remove()


@torch.no_grad()
@every_family
def test_2_frozen_ends_give_the_targets_logits_and_embeddings(kind, target):
    target = target(kind)
    family, ends, ids = target.family, target.ends, torch.arange(320)[None]
    out = target.reference(ids, output_hidden_states=True)
    assert torch.equal(ends.embed(ids), out.hidden_states[0])
    logits = ends.logits(out.hidden_states[-1])
    torch.testing.assert_close(logits, out.logits, atol=1e-6, rtol=1e-6)
    assert torch.equal(logits.argmax(-1), out.logits.argmax(-1)) and logits.shape == (1, 320, 320)
    assert torch.equal(ends.embedding, ends.head_weight) == family.tied
    assert (ends.embed_scale, ends.softcap) == (pytest.approx(family.scale), family.cap)
    assert not any(parameter.requires_grad for parameter in ends.parameters())


@torch.no_grad()
@every_family
def test_3_documents_do_not_depend_on_their_neighbours(kind, target):
    """Other tokens in one document: the forward passes keep their shape, all other documents their bits."""
    target, documents, replaced = target(kind), make_documents([20, 18, 17, 5]), make_documents([20, 18, 17, 5])
    replaced.token_ids[20:38] = 2 + (replaced.token_ids[20:38] + 7) % 290
    (before, last), (after, last_after) = target.rows(documents), target.rows(replaced)
    again, _ = target.rows(documents)
    for i in range(4):
        assert torch.equal(before[i], again[i])  # no state is left over from a forward pass
        assert torch.equal(before[i], after[i]) == torch.equal(last[i], last_after[i]) == (i != 1)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_state_left_over_from_another_document_would_show(kind, target):
    """Laid end to end, with positions that restart, a document of a hybrid target has other states than alone."""
    reference, documents = target(kind).reference.get_decoder(), make_documents([20, 18])
    first, second = (tokens_of(documents, i) for i in (0, 1))
    positions = torch.cat([torch.arange(20), torch.arange(18)])[None]
    causal = {"full_attention": torch.full((1, 1, 38, 38), -1e9).triu(1), "linear_attention": None}
    causal["full_attention"][..., 20:, :20] = -1e9  # the attention layers alone do not leak
    together = reference(torch.cat([first, second], 1), attention_mask=causal, position_ids=positions).last_hidden_state
    alone = reference(second).last_hidden_state
    assert (together[:, 20:] - alone).abs().max() > 0.1


@torch.no_grad()
@every_family
def test_4_mask_token_is_sound(kind, target):
    """A row of the table that no text holds and nothing else uses; with a padded vocabulary and with a full one."""
    target = target(kind)
    tokenizer, text = pipeline.load_tokenizer(target.args.target), target.config.get_text_config()
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, text.eos_token_id) == (256, 257, [256, 259, 260])
    mask = target.drafter_config().mask_token_id
    table = target.reference.get_input_embeddings()
    assert mask == 261 and mask < table.num_embeddings == len(target.ends.embedding)
    assert torch.equal(target.ends.embed(torch.tensor([mask])), table(torch.tensor([mask])))
    chat = [{"role": role, "content": f"I am {role}."} for role in ("system", "user", "assistant", "tool")]
    written = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert mask not in written and {256, 258} <= set(written)
    spare = [f"<|{i}|>" for i in range(len(tokenizer), 262)]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *spare]})
    assert pipeline.choose_mask_token(tokenizer, len(tokenizer), None, text) == 261 == len(tokenizer) - 1
    with pytest.raises(UserError, match="--mask-token-id 260 is the eos token"):
        pipeline.choose_mask_token(tokenizer, 320, 260, text)


@every_family
def test_5_export_has_the_names_that_servers_read(kind, target, tmp_path, monkeypatch, capsys):
    target = target(kind)
    config = target.drafter_config()
    run = write_checkpoint(tmp_path / "run", pipeline.build_drafter(config, target.args), target.folder)
    flags = ["export_drafter.py", run, "--format", "zlab", "--output-dir", tmp_path / "out", "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", [str(flag) for flag in flags])
    export_drafter.main()
    width = target.family.intermediate_size
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 32, "intermediate_size": width,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 320,
        "max_position_embeddings": 512, "rope_theta": target.family.rope_theta, "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": target.family.rope_theta},
        "block_size": 16, "num_target_layers": LAYERS, "tie_word_embeddings": False, "eos_token_id": [256, 259, 260],
        "dflash_config": {"mask_token_id": 261, "target_layer_ids": list(CAPTURED), "block_size": 16},
        "layer_types": ["full_attention"] * 2, "sliding_window": None, "dtype": "float32", "attention_bias": False,
    }  # fmt: skip
    assert {key: written[key] for key in expected} == expected
    assert not [key for key in written if "partial" in key or "softcap" in key or "quantization" in key]
    shapes = {"fc": [32, 96], "hidden_norm": [32], "norm": [32]}
    for layer in ("layers.0.", "layers.1."):
        shapes |= {f"{layer}{norm}": [32] for norm in ("input_layernorm", "post_attention_layernorm")}
        heads = {"q_proj": [32, 32], "k_proj": [16, 32], "v_proj": [16, 32], "o_proj": [32, 32], "q_norm": [8],
                 "k_norm": [8]}  # fmt: skip
        shapes |= {f"{layer}self_attn.{name}": shape for name, shape in heads.items()}
        shapes |= {f"{layer}mlp.{x}": s for x, s in (("gate_proj", [width, 32]), ("up_proj", [width, 32]),
                                                    ("down_proj", [32, width]))}  # fmt: skip
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    written_shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    assert written_shapes == {f"{name}.weight": shape for name, shape in shapes.items()}


def test_every_family_that_is_called_proven_stands_in_the_table():
    assert sorted(pipeline.PROVEN_FAMILIES) == sorted(FAMILIES)
    assert all(family.config().model_type == kind for kind, family in FAMILIES.items())


# Heads in the file ----------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("same", [True, False])
def test_tied_config_with_a_head_in_the_file_follows_transformers(same, target, tmp_path):
    """transformers ties nothing where the file holds a head that differs from the embedding."""
    target = target("qwen3")
    save_random(target.reference, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"] * (1 if same else 2)
    tensors |= {"lm_head.weight": head.clone(), "mtp.embed_tokens.weight": torch.zeros(3, 3)}
    tensors |= {f"model.layers.8.{name}.weight": torch.zeros(2, 2) for name in ("embed_tokens", "lm_head")}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    ends = pipeline.load_frozen_ends(arguments(target=str(tmp_path)).target, target.config, CPU, torch.float32)
    out = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(torch.arange(50)[None], output_hidden_states=True)
    torch.testing.assert_close(ends.logits(out.hidden_states[-1]), out.logits, atol=1e-6, rtol=1e-6)
    assert torch.equal(ends.head_weight, head) and torch.equal(ends.embedding, tensors["model.embed_tokens.weight"])


# Families that no test proves -----------------------------------------------------------------------------------------


def unproven(folder, name: str, **settings) -> tuple:
    """(config, model) of another family, through the pipeline."""
    config = getattr(transformers, f"{name}Config")(**TEXT | settings)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    randomise(model)
    args = arguments(target=save_random(model, folder), target_dtype="float32").target
    config = pipeline.load_target_config(args)
    return config, pipeline.load_target(args, config, CPU)


@pytest.mark.parametrize("name, settings", [("Olmo2", {}), ("Qwen3Next", LINEAR | EXPERTS | SHARED)])
def test_unproven_family_runs_with_a_warning_that_says_what_was_not_verified(name, settings, tmp_path):
    config, model = unproven(tmp_path, name, **settings)
    warning = pipeline.check_unproven_target(model, config)
    assert warning.startswith(f"no test proves targets of type {config.model_type}.")
    assert "Not verified: longer documents" in warning
    assert all(not layer._forward_hooks and not layer._forward_pre_hooks for layer in model.get_decoder().layers)


def test_proven_family_has_no_warning_unless_its_code_is_its_own(target):
    target = target("llama")
    model = pipeline.load_target(target.args.target, target.config, CPU)
    assert pipeline.check_unproven_target(model, target.config) is None
    own_code = type(target.config)(**target.config.to_dict() | {"auto_map": {"AutoModelForCausalLM": "x.Y"}})
    assert "no test proves" in pipeline.check_unproven_target(model, own_code)


@pytest.mark.parametrize(
    "name, settings, complaint",
    [("Granite", {"embedding_multiplier": 3.0}, "its embedding computes more than scaled rows"),
     ("Cohere", {"logit_scale": 0.1}, "its logits are not the soft-capped product with its head"),
     ("Granite", {"logits_scaling": 2.0}, "its logits are not")],
)  # fmt: skip
def test_family_whose_ends_compute_something_else_is_refused(name, settings, complaint, tmp_path):
    config, model = unproven(tmp_path, name, **settings)
    with pytest.raises(UserError, match=f"a {config.model_type} cannot be a target here: {complaint}"):
        pipeline.check_unproven_target(model, config)


def test_look_ahead_and_a_second_norm_are_refused(tmp_path):
    config, model = unproven(tmp_path, "Olmo2")
    decoder = model.get_decoder()
    for layer in decoder.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(UserError, match="its tokens see those after them"):
        pipeline.check_unproven_target(model, config)
    for layer in decoder.layers:
        layer.self_attn.is_causal = True
    assert pipeline.check_unproven_target(model, config)
    decoder.forward = functools.partial(scaled_after_the_norm, decoder.forward)
    with pytest.raises(UserError, match="its last hidden state is not the final norm of the last layer"):
        pipeline.check_unproven_target(model, config)


def scaled_after_the_norm(forward, *args, **kwargs):
    out = forward(*args, **kwargs)
    out.last_hidden_state = 2 * out.last_hidden_state
    return out


@pytest.mark.parametrize(
    "name, settings, complaint",
    [("T5", {}, "is no causal language model"), ("Bart", {}, "bart is an encoder-decoder"),
     ("Gemma3Text", {"use_bidirectional_attention": True}, "its text tokens see those after them"),
     ("ViT", {}, "a model of type vit is no causal language model"), ("Mamba", {}, "the num_attention_heads of a mamba is not one number")],
)  # fmt: skip
def test_what_is_no_causal_decoder_is_refused_by_its_config(name, settings, complaint, tmp_path):
    getattr(transformers, f"{name}Config")(**settings).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=complaint):
        pipeline.load_target_config(arguments(target=str(tmp_path)).target)


@pytest.mark.parametrize("name, settings", [("Bert", {"is_decoder": True}), ("Phi", {}), ("GPTNeoX", {})])
def test_ends_of_another_make_are_refused(name, settings, tmp_path):
    getattr(transformers, f"{name}Config")(**dict(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2) | settings,
    ).save_pretrained(tmp_path)  # fmt: skip
    args = arguments(target=str(tmp_path)).target
    with pytest.raises(UserError, match="has no final `norm` or no head without a bias"):
        pipeline.load_frozen_ends(args, pipeline.load_target_config(args), CPU, torch.float32)
