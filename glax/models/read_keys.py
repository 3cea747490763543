"""List the keys of a config that the models' own code reads: transformers 5.24.0, fla-core 0.6.0, mamba-ssm 2.3.2.post1.

tests/models/read_keys.py writes this file.
"""

# What all types of a family read.
SHARED = {
    "@fla": """
        attn attn_implementation dequantize experts_implementation fuse_cross_entropy fuse_linear_cross_entropy
        fuse_norm gradient_checkpointing hidden_act hidden_ratio hidden_size initializer_range intermediate_size
        load_in_8bit max_position_embeddings name_or_path norm_eps num_hidden_layers output_attentions
        output_hidden_states pad_token_id per_layer_config quant_method quantization_config return_dict
        rope_parameters rope_scaling tie_word_embeddings use_cache use_l2warp vocab_size
    """,
    "@transformers": """
        attn_implementation dequantize experts_implementation gradient_checkpointing hidden_size initializer_range
        load_in_8bit name_or_path output_hidden_states per_layer_config quant_method quantization_config return_dict
        rope_parameters rope_scaling tie_word_embeddings vocab_size
    """,
}
READ_WORDS = {
    "bailing_hybrid": """
        @transformers attention_bias attention_dropout attribute_map default_rope_type head_dim hidden_act
        ignore_keys_at_rope_validation intermediate_size is_causal kda_lower_bound kda_safe_gate kv_lora_rank
        kv_sharing_modes layer_types linear_conv_kernel_dim linear_head_dim linear_num_heads max_position_embeddings
        mlp_layer_types model_max_length moe_intermediate_size moe_renormalize n_group n_shared_experts norm_topk_prob
        num_attention_heads num_expert_group num_experts num_experts_per_tok num_experts_per_token num_hidden_layers
        num_key_value_heads num_local_experts num_mtp_layers num_nextn_predict_layers num_shared_experts
        number_of_conv_states original_max_position_embeddings output_attentions output_router_logits pad_token_id
        partial_rotary_factor q_lora_rank qk_nope_head_dim qk_rope_head_dim rms_norm_eps rope_theta
        routed_scaling_factor topk_group v_head_dim vision_aspect_ratio vision_feature_layer
        vision_feature_select_strategy
    """,
    "bailing_moe_v2_5": """
        attention_dropout first_k_dense_replace group_norm_size head_dim hidden_act hidden_size initializer_range
        intermediate_size kv_lora_rank layer_group_size max_position_embeddings moe_intermediate_size
        mtp_loss_scaling_factor n_group num_attention_heads num_experts num_experts_per_tok num_hidden_layers
        num_key_value_heads num_nextn_predict_layers num_shared_experts output_attentions output_hidden_states
        output_router_logits pad_token_id partial_rotary_factor q_lora_rank qk_head_dim qk_nope_head_dim
        qk_rope_head_dim rms_norm_eps rope_interleave rope_scaling rope_theta routed_scaling_factor topk_group
        use_bias use_cache use_qk_norm use_qkv_bias v_head_dim vocab_size
    """,
    "bamba": """
        @transformers attention_bias attention_dropout attn_layer_indices attribute_map default_rope_type head_dim
        hidden_act ignore_keys_at_rope_validation intermediate_size is_causal kv_sharing_modes layer_types
        layers_block_type mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_expand
        mamba_n_groups mamba_n_heads mamba_proj_bias max_position_embeddings mlp_bias num_attention_heads
        num_hidden_layers num_key_value_heads num_logits_to_keep number_of_conv_states
        original_max_position_embeddings output_attentions pad_token_id rms_norm_eps rope_theta time_step_limit
        vision_aspect_ratio vision_feature_layer vision_feature_select_strategy z_loss_coefficient
    """,
    "comba": """
        @fla attn_mode attnres_block_size conv_size expand_v fuse_swiglu head_dim num_heads num_v_heads
        use_output_gate use_short_conv
    """,
    "delta_net": """
        @fla allow_neg_eigval attn_mode attnres_block_size conv_size expand_k expand_v fuse_swiglu num_heads
        qk_activation qk_norm use_beta use_gate use_output_norm use_short_conv
    """,
    "falcon_h1": """
        @transformers attention_bias attention_dropout attention_in_multiplier attention_out_multiplier attribute_map
        default_rope_type embedding_multiplier head_dim hidden_act ignore_keys_at_rope_validation intermediate_size
        is_causal key_multiplier kv_sharing_modes layer_types lm_head_multiplier mamba_chunk_size mamba_conv_bias
        mamba_d_conv mamba_d_head mamba_d_ssm mamba_d_state mamba_expand mamba_n_groups mamba_n_heads
        mamba_norm_before_gate mamba_proj_bias mamba_rms_norm max_position_embeddings mlp_bias mlp_multipliers
        num_attention_heads num_hidden_layers num_key_value_heads num_logits_to_keep number_of_conv_states
        original_max_position_embeddings output_attentions pad_token_id partial_rotary_factor projectors_bias
        rms_norm_eps rope_theta ssm_in_multiplier ssm_multipliers ssm_out_multiplier time_step_limit
        vision_aspect_ratio vision_feature_layer vision_feature_select_strategy
    """,
    "falcon_mamba": """
        @transformers conv_kernel hidden_act intermediate_size kv_sharing_modes layer_norm_epsilon layer_types
        mixer_rms_eps num_hidden_layers number_of_conv_states rescale_prenorm_residual residual_in_fp32 state_size
        time_step_floor time_step_init_scheme time_step_max time_step_min time_step_rank time_step_scale
        use_associative_scan use_bias use_cache use_conv_bias use_falcon_mambapy use_mambapy
    """,
    "gated_deltanet": """
        @fla allow_neg_eigval attn_mode attnres_block_size conv_size expand_v fuse_swiglu head_dim num_heads
        num_v_heads output_gate_activation use_gate use_short_conv
    """,
    "gated_deltaproduct": """
        @fla allow_neg_eigval attn_mode attnres_block_size conv_size expand_v fuse_swiglu head_dim num_heads
        num_householder use_forget_gate use_output_gate use_short_conv
    """,
    "gla": """
        @fla attn_mode attnres_block_size clamp_min conv_size elementwise_affine expand_k expand_v feature_map
        fuse_swiglu num_heads num_kv_heads use_output_gate use_short_conv
    """,
    "glm5_next": """
        name_or_path rope_parameters text_config tie_word_embeddings vision_config
    """,
    "glm5_next_text": """
        @transformers attention_bias attention_dropout attribute_map hc_eps hc_mult hc_sinkhorn_iters hidden_act
        index_head_dim index_kpool index_kpool_always_select_tail index_n_heads index_topk indexer_types
        intermediate_size is_causal kv_lora_rank kv_sharing_modes layer_types linear_attn_config
        linear_conv_kernel_dim linear_head_dim linear_lower_bound linear_num_heads mlp_layer_types
        moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob num_attention_heads
        num_experts_per_tok num_hidden_layers num_key_value_heads num_local_experts number_of_conv_states
        output_attentions output_router_logits pad_token_id q_lora_rank qk_nope_head_dim qk_rope_head_dim rms_norm_eps
        routed_scaling_factor swiglu_limit topk_group v_head_dim vision_aspect_ratio vision_feature_layer
        vision_feature_select_strategy
    """,
    "granitemoehybrid": """
        @transformers attention_bias attention_dropout attention_multiplier attribute_map default_rope_type
        embedding_multiplier head_dim hidden_act ignore_keys_at_rope_validation intermediate_size is_causal
        kv_sharing_modes layer_types layers_block_type logits_scaling mamba_chunk_size mamba_conv_bias mamba_d_conv
        mamba_d_head mamba_d_state mamba_expand mamba_n_groups mamba_n_heads mamba_proj_bias max_position_embeddings
        num_attention_heads num_experts_per_tok num_hidden_layers num_key_value_heads num_local_experts
        number_of_conv_states original_max_position_embeddings output_attentions output_router_logits pad_token_id
        partial_rotary_factor position_embedding_type residual_multiplier rms_norm_eps rope_theta router_aux_loss_coef
        shared_intermediate_size time_step_limit vision_aspect_ratio vision_feature_layer
        vision_feature_select_strategy
    """,
    "gsa": """
        @fla attnres_block_size conv_size elementwise_affine expand_k expand_v feature_map fuse_swiglu
        gate_logit_normalizer num_heads num_kv_heads num_slots use_norm use_output_gate use_short_conv
    """,
    "hgrn": """
        @fla attn_mode attnres_block_size conv_size elementwise_affine expand_ratio fuse_swiglu use_lower_bound
        use_short_conv
    """,
    "hgrn2": """
        @fla attn_mode attnres_block_size conv_size elementwise_affine expand_ratio fuse_swiglu num_heads
        use_lower_bound use_short_conv
    """,
    "jamba": """
        @transformers attention_dropout attribute_map head_dim hidden_act intermediate_size is_causal kv_sharing_modes
        layer_types layers_block_type layers_num_experts mamba_conv_bias mamba_d_conv mamba_d_state mamba_dt_rank
        mamba_expand mamba_proj_bias num_attention_heads num_experts num_experts_per_tok num_hidden_layers
        num_key_value_heads num_local_experts number_of_conv_states output_attentions output_router_logits
        pad_token_id rms_norm_eps router_aux_loss_coef use_associative_scan use_mamba_kernels use_mambapy
        vision_aspect_ratio vision_feature_layer vision_feature_select_strategy
    """,
    "kda": """
        @fla allow_neg_eigval attn_mode attnres_block_size conv_size expand_v fuse_swiglu head_dim lower_bound
        num_heads num_v_heads safe_gate use_short_conv
    """,
    "kimi_k3": """
        quantization_config text_config tie_word_embeddings vision_config
    """,
    "kimi_k3_text": """
        @transformers activation_situ_beta activation_situ_linear_beta attention_dropout attn_res_block_size
        first_k_dense_replace head_dim hidden_act intermediate_size kv_lora_rank latent_moe_use_norm
        linear_attn_config max_position_embeddings mla_use_nope mla_use_output_gate moe_intermediate_size
        moe_layer_freq moe_renormalize moe_router_activation_func num_attention_heads num_expert_group num_experts
        num_experts_per_token num_hidden_layers num_key_value_heads num_nextn_predict_layers num_shared_experts
        pad_token_id q_lora_rank qk_nope_head_dim qk_rope_head_dim rms_norm_eps rope_theta routed_expert_hidden_size
        routed_scaling_factor topk_group topk_method use_grouped_topk v_head_dim
    """,
    "kimi_linear": """
        @transformers attention_bias attention_dropout attribute_map hidden_act intermediate_size is_causal
        kv_lora_rank kv_sharing_modes layer_types linear_conv_kernel_dim linear_head_dim linear_num_heads
        mlp_layer_types moe_intermediate_size moe_renormalize n_group n_shared_experts norm_topk_prob
        num_attention_heads num_expert_group num_experts num_experts_per_tok num_experts_per_token num_hidden_layers
        num_key_value_heads num_local_experts num_shared_experts number_of_conv_states output_attentions
        output_router_logits pad_token_id q_lora_rank qk_nope_head_dim qk_rope_head_dim rms_norm_eps
        routed_scaling_factor topk_group v_head_dim vision_aspect_ratio vision_feature_layer
        vision_feature_select_strategy
    """,
    "lara_mini": """
        @transformers attention_bias attention_dropout default_rope_type head_dim hidden_act
        ignore_keys_at_rope_validation intermediate_size is_causal kv_sharing_modes layer_types linear_conv_kernel_dim
        linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim max_position_embeddings
        moe_intermediate_size norm_topk_prob num_attention_heads num_experts num_experts_per_tok num_hidden_layers
        num_key_value_heads number_of_conv_states original_max_position_embeddings output_attentions
        output_router_logits pad_token_id partial_rotary_factor rms_norm_eps rope_theta router_aux_loss_coef
        shared_expert_intermediate_size sliding_window vision_aspect_ratio vision_feature_layer
        vision_feature_select_strategy
    """,
    "lfm2": """
        @transformers block_auto_adjust_ff_dim block_ff_dim block_ffn_dim_multiplier block_multiple_of conv_L_cache
        conv_bias default_rope_type head_dim ignore_keys_at_rope_validation intermediate_size is_causal
        kv_sharing_modes layer_types max_position_embeddings norm_eps num_attention_heads num_hidden_layers
        num_key_value_heads number_of_conv_states original_max_position_embeddings output_attentions pad_token_id
        partial_rotary_factor rope_theta tie_embedding vision_aspect_ratio vision_feature_layer
        vision_feature_select_strategy
    """,
    "lfm2_moe": """
        @transformers conv_L_cache conv_bias default_rope_type head_dim ignore_keys_at_rope_validation
        intermediate_size is_causal kv_sharing_modes layer_types max_position_embeddings moe_intermediate_size
        norm_eps norm_topk_prob num_attention_heads num_dense_layers num_experts num_experts_per_tok num_hidden_layers
        num_key_value_heads number_of_conv_states original_max_position_embeddings output_attentions
        output_router_logits pad_token_id partial_rotary_factor rope_theta routed_scaling_factor tie_embedding
        use_expert_bias vision_aspect_ratio vision_feature_layer vision_feature_select_strategy
    """,
    "lfm3": """
        @transformers attention_bias attention_dropout attribute_map conv_L_cache conv_bias default_rope_type head_dim
        ignore_keys_at_rope_validation intermediate_size is_causal kv_sharing_modes layer_types
        max_position_embeddings norm_eps num_attention_heads num_hidden_layers num_key_value_heads
        number_of_conv_states original_max_position_embeddings output_attentions pad_token_id partial_rotary_factor
        rms_norm_eps rope_theta sliding_window use_attention_gate use_sandwich_norm vision_aspect_ratio
        vision_feature_layer vision_feature_select_strategy
    """,
    "llama": """
        @transformers attention_bias attention_chunk_size attention_dropout default_rope_type head_dim hidden_act
        ignore_keys_at_rope_validation intermediate_size is_causal kv_sharing_modes layer_types
        max_position_embeddings mlp_bias num_attention_heads num_hidden_layers num_key_value_heads
        original_max_position_embeddings output_attentions pad_token_id partial_rotary_factor rms_norm_eps rope_theta
        sliding_window vision_aspect_ratio vision_feature_layer vision_feature_select_strategy
    """,
    "mamba": """
        @transformers conv_kernel hidden_act intermediate_size kv_sharing_modes layer_norm_epsilon layer_types
        num_hidden_layers number_of_conv_states rescale_prenorm_residual residual_in_fp32 state_size time_step_floor
        time_step_init_scheme time_step_max time_step_min time_step_rank time_step_scale use_associative_scan use_bias
        use_cache use_conv_bias use_mambapy
    """,
    "mamba2": """
        @transformers chunk_size conv_kernel expand head_dim hidden_act kv_sharing_modes layer_norm_epsilon
        layer_types n_groups num_heads num_hidden_layers number_of_conv_states rescale_prenorm_residual
        residual_in_fp32 state_size time_step_floor time_step_limit time_step_max time_step_min time_step_rank
        use_bias use_cache use_conv_bias
    """,
    "mamba2_fla": """
        A_init_range D_has_hdim attn attn_implementation chunk_size conv_init conv_kernel dequantize dt_init_floor
        dt_limit dt_max dt_min expand experts_implementation fuse_cross_entropy fuse_linear_cross_entropy
        gradient_checkpointing head_dim hidden_act hidden_size initializer_range load_in_8bit max_position_embeddings
        n_groups name_or_path norm_before_gate norm_eps num_heads num_hidden_layers output_hidden_states
        per_layer_config quant_method quantization_config rescale_prenorm_residual residual_in_fp32 return_dict
        rmsnorm rope_parameters rope_scaling state_size tie_word_embeddings use_bias use_cache use_conv_bias
        use_l2warp vocab_size
    """,
    "mamba2_state_spaces": """
        attn_cfg attn_layer_idx d_intermediate d_model fused_add_norm n_layer pad_vocab_size_multiple residual_in_fp32
        rms_norm ssm_cfg tie_embeddings vocab_size
    """,
    "mamba3": """
        A_floor attn attn_implementation chunk_size dequantize dt_init_floor dt_max dt_min expand
        experts_implementation fuse_cross_entropy fuse_linear_cross_entropy gradient_checkpointing head_dim
        hidden_size initializer_range is_mimo is_outproj_norm load_in_8bit max_position_embeddings mimo_rank n_groups
        name_or_path norm_eps num_heads num_hidden_layers output_hidden_states per_layer_config quant_method
        quantization_config rescale_prenorm_residual residual_in_fp32 return_dict rope_fraction rope_parameters
        rope_scaling state_size tie_word_embeddings use_bias use_cache use_l2warp vocab_size
    """,
    "mamba_fla": """
        attn attn_implementation conv_kernel dequantize dt_init_floor dt_init_scheme dt_max dt_min dt_rank dt_scale
        experts_implementation fuse_cross_entropy fuse_linear_cross_entropy gradient_checkpointing hidden_act
        hidden_size initializer_range intermediate_size load_in_8bit max_position_embeddings name_or_path norm_eps
        num_hidden_layers output_attentions output_hidden_states per_layer_config quant_method quantization_config
        rescale_prenorm_residual residual_in_fp32 return_dict rope_parameters rope_scaling state_size
        tie_word_embeddings use_bias use_cache use_conv_bias use_l2warp vocab_size
    """,
    "minimax": """
        @transformers attention_dropout block_size default_rope_type full_attn_alpha_factor full_attn_beta_factor
        head_dim hidden_act ignore_keys_at_rope_validation intermediate_size is_causal layer_types
        linear_attn_alpha_factor linear_attn_beta_factor max_position_embeddings mlp_alpha_factor mlp_beta_factor
        num_attention_heads num_experts num_experts_per_tok num_hidden_layers num_key_value_heads num_local_experts
        original_max_position_embeddings output_attentions output_router_logits pad_token_id partial_rotary_factor
        rms_norm_eps rope_theta router_aux_loss_coef router_jitter_noise sliding_window vision_aspect_ratio
        vision_feature_layer vision_feature_select_strategy
    """,
    "nemotron_h": """
        @transformers attention_dropout chunk_size conv_kernel head_dim intermediate_size is_causal kv_sharing_modes
        layer_norm_epsilon layer_types layers_block_type mamba_chunk_size mamba_conv_bias mamba_d_conv
        mamba_dt_init_floor mamba_dt_max mamba_dt_min mamba_head_dim mamba_hidden_act mamba_n_groups mamba_num_heads
        mlp_bias mlp_hidden_act moe_intermediate_size moe_latent_size moe_shared_expert_intermediate_size
        mtp_hybrid_override_pattern n_group n_groups n_routed_experts norm_topk_prob num_attention_heads
        num_experts_per_tok num_hidden_layers num_key_value_heads num_local_experts num_logits_to_keep
        number_of_conv_states output_attentions output_router_logits rescale_prenorm_residual routed_scaling_factor
        ssm_state_size time_step_floor time_step_max time_step_min topk_group use_bias use_conv_bias use_mamba_kernels
        vision_aspect_ratio vision_feature_layer vision_feature_select_strategy
    """,
    "olmo_hybrid": """
        @transformers attention_bias attention_dropout default_rope_type head_dim hidden_act
        ignore_keys_at_rope_validation intermediate_size is_causal kv_sharing_modes layer_types linear_a_log_max
        linear_a_log_min linear_allow_neg_eigval linear_conv_kernel_dim linear_dt_init_floor linear_dt_max
        linear_dt_min linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim
        max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads number_of_conv_states
        original_max_position_embeddings output_attentions pad_token_id partial_rotary_factor rms_norm_eps rope_theta
        vision_aspect_ratio vision_feature_layer vision_feature_select_strategy
    """,
    "qwen3": """
        @transformers attention_bias attention_dropout default_rope_type head_dim hidden_act
        ignore_keys_at_rope_validation intermediate_size is_causal kv_sharing_modes layer_types
        max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads
        original_max_position_embeddings output_attentions pad_token_id partial_rotary_factor rms_norm_eps rope_theta
        sliding_window use_sliding_window vision_aspect_ratio vision_feature_layer vision_feature_select_strategy
    """,
    "qwen3_5": """
        quantization_config rope_parameters sub_configs text_config tie_word_embeddings
    """,
    "qwen3_5_moe": """
        quantization_config rope_parameters sub_configs text_config tie_word_embeddings
    """,
    "qwen3_5_moe_text": """
        @transformers attention_bias attention_dropout default_rope_type head_dim hidden_act
        ignore_keys_at_rope_validation is_causal kv_sharing_modes layer_types linear_conv_kernel_dim
        linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim max_position_embeddings
        moe_intermediate_size num_attention_heads num_experts num_experts_per_tok num_hidden_layers
        num_key_value_heads number_of_conv_states original_max_position_embeddings output_attentions
        output_router_logits pad_token_id partial_rotary_factor rms_norm_eps rope_theta router_aux_loss_coef
        shared_expert_intermediate_size vision_aspect_ratio vision_feature_layer vision_feature_select_strategy
    """,
    "qwen3_5_text": """
        @transformers attention_bias attention_dropout default_rope_type head_dim hidden_act
        ignore_keys_at_rope_validation intermediate_size is_causal kv_sharing_modes layer_types linear_conv_kernel_dim
        linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim max_position_embeddings
        num_attention_heads num_hidden_layers num_key_value_heads number_of_conv_states
        original_max_position_embeddings output_attentions pad_token_id partial_rotary_factor rms_norm_eps rope_theta
        vision_aspect_ratio vision_feature_layer vision_feature_select_strategy
    """,
    "qwen3_next": """
        @transformers attention_bias attention_dropout decoder_sparse_step default_rope_type head_dim hidden_act
        ignore_keys_at_rope_validation intermediate_size is_causal kv_sharing_modes layer_types linear_conv_kernel_dim
        linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim max_position_embeddings
        mlp_only_layers moe_intermediate_size norm_topk_prob num_attention_heads num_experts num_experts_per_tok
        num_hidden_layers num_key_value_heads number_of_conv_states original_max_position_embeddings output_attentions
        output_router_logits pad_token_id partial_rotary_factor rms_norm_eps rope_theta router_aux_loss_coef
        shared_expert_intermediate_size vision_aspect_ratio vision_feature_layer vision_feature_select_strategy
    """,
    "qwen4_exp": """
        quantization_config rope_parameters sub_configs text_config tie_word_embeddings
    """,
    "qwen4_exp_text": """
        @transformers attention_bias attention_dropout default_rope_type eos_token_id hc_count hc_lowrank head_dim
        heads_per_ngram hidden_act ignore_keys_at_rope_validation indexer_budget indexer_compress_ratio
        indexer_head_dim indexer_kv_heads indexer_n_heads intermediate_size is_causal kv_sharing_modes layer_types
        linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim
        make_ngram_vocab_size_divisible_by max_position_embeddings moe_intermediate_size ngram_size
        ngram_vocab_size_base norm_topk_prob num_attention_heads num_experts num_experts_per_tok num_hidden_layers
        num_key_value_heads number_of_conv_states original_max_position_embeddings output_attentions output_gate_type
        output_router_logits pad_token_id partial_rotary_factor ple_conv_kernel_size ple_embed_dim ple_layer_ids
        rms_norm_eps rope_theta router_aux_loss_coef seed shared_expert_intermediate_size vision_aspect_ratio
        vision_feature_layer vision_feature_select_strategy
    """,
    "recurrent_gemma": """
        @transformers attention_bias attention_dropout attention_window_size attribute_map conv1d_width
        default_rope_type final_w_init_variance_scale head_dim hidden_activation ignore_keys_at_rope_validation
        init_std initializer_factor intermediate_size is_causal layer_types layers_block_type logits_soft_cap
        lru_width num_attention_heads num_hidden_layers num_key_value_heads output_attentions pad_token_id
        partial_rotary_factor rms_norm_eps rope_theta sliding_window vision_aspect_ratio vision_feature_layer
        vision_feature_select_strategy w_init_variance_scale
    """,
    "retnet": """
        @fla attn_mode attnres_block_size elementwise_affine expand_k expand_v feature_map fuse_swiglu num_heads
        num_kv_heads use_output_gate
    """,
    "rwkv": """
        @transformers attention_hidden_size context_length init_std initializer_factor intermediate_size
        layer_norm_epsilon max_position_embeddings num_hidden_layers output_attentions rescale_every use_cache
    """,
    "rwkv6": """
        @fla attn_mode expand_k expand_v gate_low_rank_dim norm_bias norm_first num_heads proj_low_rank_dim
    """,
    "rwkv7": """
        @fla a_low_rank_dim attn_mode decay_low_rank_dim gate_low_rank_dim head_dim norm_bias norm_first num_heads
        v_low_rank_dim value_dim
    """,
    "xlstm": """
        @transformers autocast_kernel_dtype chunk_size embedding_dim eps ffn_proj_factor ffn_round_up_to_multiple_of
        gate_soft_cap inference_state_dtype init_std initializer_factor is_causal max_inference_chunksize mode
        norm_eps norm_reduction_force_float32 num_blocks num_heads num_hidden_layers output_logit_soft_cap
        qk_dim_factor return_last_states use_bias v_dim_factor vision_aspect_ratio vision_feature_layer
        vision_feature_select_strategy weight_mode
    """,
    "zamba": """
        @transformers attention_dropout attention_head_dim attention_hidden_size attribute_map head_dim hidden_act
        hidden_mamba_act intermediate_size is_causal kv_sharing_modes layer_types layers_block_type mamba_conv_bias
        mamba_d_conv mamba_d_state mamba_dt_rank mamba_expand mamba_proj_bias max_position_embeddings n_mamba_heads
        num_attention_heads num_key_value_heads num_logits_to_keep number_of_conv_states output_attentions
        pad_token_id rms_norm_eps time_step_floor time_step_max time_step_min use_associative_scan use_mamba_kernels
        vision_aspect_ratio vision_feature_layer vision_feature_select_strategy
    """,
    "zamba2": """
        @transformers adapter_rank add_bias_linear attention_dropout attention_head_dim attention_hidden_size
        attribute_map chunk_size default_rope_type head_dim hidden_act hybrid_layer_ids ignore_keys_at_rope_validation
        intermediate_size is_causal kv_sharing_modes layer_types layers_block_type mamba_d_conv mamba_d_state
        mamba_expand mamba_headdim mamba_ngroups max_position_embeddings n_mamba_heads num_attention_heads
        num_key_value_heads num_logits_to_keep num_mem_blocks number_of_conv_states original_max_position_embeddings
        output_attentions pad_token_id partial_rotary_factor rms_norm_eps rope_theta time_step_floor time_step_max
        time_step_min use_conv_bias use_long_context use_mamba_kernels use_mem_rope use_shared_attention_adapter
        vision_aspect_ratio vision_feature_layer vision_feature_select_strategy
    """,
}
READ_KEYS = {
    code: frozenset(" ".join(SHARED.get(word, word) for word in words.split()).split())
    for code, words in READ_WORDS.items()
}
