"""`COMMON_KEYS`: the keys of any `config.json` that change no model here."""

# Of tokens, labels, generation and other heads' losses.
COMMON_KEYS = frozenset([
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "add_cross_attention",
    "attn_implementation", "auto_map", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "chunk_size_feed_forward", "cls_token_id", "cross_attention_hidden_size", "decoder_start_token_id",
    "diversity_penalty", "do_sample", "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
    "gradient_checkpointing", "id2label", "is_decoder", "is_encoder_decoder", "label2id", "length_penalty",
    "mask_token_id", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_past", "output_scores",
    "position_embedding_type", "prefix", "problem_type", "remove_invalid_values", "repetition_penalty", "return_dict",
    "return_dict_in_generate", "sbert_ce_default_activation_function", "sentence_transformers", "sep_token_id",
    "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder",
    "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers.js_config",
    "transformers_version", "typical_p", "unk_token_id", "use_bfloat16", "use_cache",
])  # fmt: skip
