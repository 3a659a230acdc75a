"""Keys of config.json that change nothing a model computes. docs/decisions/config_keys.md says how they are told apart."""

from __future__ import annotations

from rayllm.config.json_fields import JsonFields
from rayllm.errors import ModelError

# The whole vocabulary of transformers for what is not the model's mathematics, and what other tools leave behind.
HARMLESS = frozenset(
    # Where the file comes from, and for which code it was written. No code of a checkpoint is ever imported.
    "_name_or_path name_or_path _commit_hash transformers_version auto_map trust_remote_code transformers.js_config"
    " is_llama_config task_specific_params finetuning_task problem_type id2label label2id num_labels prefix"
    # Which implementation computes the same, and in which form it hands out the results.
    " attn_implementation _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled use_flash_attn"
    " use_flash_attention use_sdpa use_cache use_bfloat16 torchscript return_dict output_attentions"
    " output_hidden_states tie_last_hidden_states tf_legacy_loss chunk_size_feed_forward pretraining_tp"
    " attention_softmax_in_fp32 masked_softmax_fusion skip_bias_add offset_alibi is_decoder"
    # Training; dropout is below.
    " initializer_range init_std layerdrop gradient_checkpointing use_recompute"
    # Lengths that limit nothing, and the extended YaRN's sign that its factor is in the weights.
    " model_max_length max_sequence_length max_position_embeddings seq_length finetuned"
    # How to generate: transformers leaves these to generation_config.json.
    " do_sample temperature top_k top_p min_p typical_p epsilon_cutoff eta_cutoff max_length min_length max_new_tokens"
    " repetition_penalty encoder_repetition_penalty length_penalty diversity_penalty early_stopping num_beams"
    " num_beam_groups num_return_sequences no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids"
    " suppress_tokens begin_suppress_tokens exponential_decay_length_penalty remove_invalid_values output_scores"
    " return_dict_in_generate".split()
)
HARMLESS_PARTS = ("dropout", "token_id", "tokenizer", "unsloth")
ALWAYS_TRUE = ("is_causal", "learned_embeddings")  # of what every model here computes; false would be something else


def refuse_unknown(fields: JsonFields) -> None:
    """Raises ModelError that names a key which nothing has read and which is not harmless.

    null, false and what is empty switch a feature off, so that any key may have them.
    """
    for key, value in fields.data.items():
        if key in fields.read or key in HARMLESS or any(part in key for part in HARMLESS_PARTS):
            continue
        off = value is None or value is False or value in ("", [], {})
        if value is not True if key in ALWAYS_TRUE else not off:
            raise ModelError(
                f'{fields.file}: "{fields.prefix}{key}" is not understood and may change what the model computes '
                "(remove it if the model does without it in transformers)"
            )
