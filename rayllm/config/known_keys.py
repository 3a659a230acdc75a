"""Keys of config.json that change nothing a model computes, and the refusal of all others that nothing reads.

docs/decisions/config_keys.md says why.
"""

from __future__ import annotations

from collections.abc import Collection

from rayllm.config.json_fields import JsonFields
from rayllm.errors import ModelError

# Reason -> keys. No code of a checkpoint is ever imported, so that auto_map is one of them.
_HARMLESS = {
    "where the file comes from, and for which code or task it was written": (
        "_name_or_path name_or_path _commit_hash transformers_version auto_map trust_remote_code transformers.js_config"
        " is_llama_config task_specific_params finetuning_task problem_type id2label label2id num_labels prefix"
    ),
    "which implementation computes the same, and the form of its reply": (
        "attn_implementation _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled use_flash_attn"
        " use_flash_attention use_sdpa use_cache use_bfloat16 torchscript return_dict output_attentions"
        " output_hidden_states output_router_logits tie_last_hidden_states tf_legacy_loss chunk_size_feed_forward"
        " pretraining_tp cache_implementation"
        " attention_softmax_in_fp32 masked_softmax_fusion skip_bias_add offset_alibi is_decoder"
    ),
    "training": (
        "initializer_range init_std layerdrop gradient_checkpointing use_recompute router_aux_loss_coef"
        " router_jitter_noise ep_size seq_aux aux_loss_alpha"
    ),
    "lengths that limit nothing, and that a model was trained with the factor of its rope_scaling": (
        "model_max_length max_sequence_length max_position_embeddings seq_length finetuned"
    ),
    "how to generate, which transformers leaves to generation_config.json": (
        "do_sample temperature top_k top_p min_p typical_p epsilon_cutoff eta_cutoff max_length min_length"
        " max_new_tokens repetition_penalty encoder_repetition_penalty length_penalty diversity_penalty early_stopping"
        " num_beams num_beam_groups num_return_sequences no_repeat_ngram_size encoder_no_repeat_ngram_size"
        " bad_words_ids suppress_tokens begin_suppress_tokens exponential_decay_length_penalty remove_invalid_values"
        " output_scores return_dict_in_generate"
    ),
}
_TOWERS = (
    "vision_config audio_config image_token_index video_token_index boi_token_index eoi_token_index image_seq_length"
    " projector_hidden_act multimodal_projector_bias spatial_merge_size mm_tokens_per_image vision_feature_layer"
    " vision_feature_select_strategy vision_soft_tokens_per_image eoa_token_index"
)
# Of checkpoints that hold towers for images or sound beside a text model: what the towers are.
TOWERS = frozenset(_TOWERS.split())
HARMLESS = frozenset(" ".join(_HARMLESS.values()).split())
HARMLESS_PARTS = ("dropout", "pdrop", "token_id", "tokenizer", "unsloth")  # of a key
ALWAYS_TRUE = ("is_causal", "learned_embeddings")  # what models here compute anyway; any other value is refused


def refuse_unknown(fields: JsonFields, harmless: Collection[str] = ()) -> None:
    """Raises ModelError that names a key which nothing has read and which may change what the model computes.

    harmless: further keys that change nothing.
    null, false and what is empty switch a feature off, so any other key may have them.
    """
    for key, value in fields.data.items():
        if key in fields.read or key in HARMLESS or key in harmless or any(part in key for part in HARMLESS_PARTS):
            continue
        off = value is None or value is False or value in ("", [], {})
        if value is True if key in ALWAYS_TRUE else off:
            continue
        raise ModelError(
            f'{fields.file}: "{fields.prefix}{key}" is not understood and may change what the model computes '
            "(remove it if the model does not need it)"
        )
