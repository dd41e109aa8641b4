"""Settings of verl's PPO trainer and what each becomes, as tables.

Keys are those of verl's ``ppo_trainer`` and ``ppo_megatron_trainer`` of January 2026.
"""

from __future__ import annotations

from deploy.migrate.conversion import ConversionRule, same, schedule

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
TURNS = f"{ROLLOUT}.multi_turn"
CORRECTION = "algorithm.rollout_correction"
OVERLONG = "reward_model.reward_kwargs"
SHARDED = "the model is sharded over all ranks by FSDP2; trainer.parallel splits layers and sequences"
PROFILES = "trainer.profile_steps names the steps to profile"
MEMORY = "memory of a step is bounded by trainer.micro_batch_tokens, of all forward passes"
SEPARATE = "generators are services beside the trainer, not on its GPUs in turns"

RULES = (
    ConversionRule(f"{MODEL}.path", "model.path", convert=same),
    ConversionRule(f"{MODEL}.trust_remote_code", "model.trust_remote_code", convert=same),
    ConversionRule("data.max_prompt_length", "model.max_length", "prompt and response together"),
    ConversionRule("data.max_response_length", "sampling.max_tokens", "and model.max_length", same),
    ConversionRule(
        "data.train_files", "train.args.path", "train.name is hf; the folder, with the file's name as the split"
    ),
    ConversionRule("data.val_files", "eval.dataset.args.path", "likewise"),
    ConversionRule("data.prompt_key", "train.args.prompt"),
    ConversionRule("data.shuffle", "train.shuffle", convert=same),
    ConversionRule("data.train_max_samples", "train.limit", convert=lambda count: count if count > 0 else None),
    ConversionRule("data.train_batch_size", "trainer.batch_groups", "prompts; 1024 there by default"),
    ConversionRule(f"{ACTOR}.ppo_mini_batch_size", "trainer.minibatches", "train_batch_size divided by it"),
    ConversionRule(f"{ACTOR}.ppo_epochs", "trainer.epochs", convert=same),
    ConversionRule(f"{ACTOR}.ppo_max_token_len_per_gpu", "trainer.micro_batch_tokens", convert=same),
    ConversionRule(f"{ACTOR}.use_dynamic_bsz", note="always: micro-batches are cut by tokens"),
    ConversionRule(f"{ACTOR}.optim.lr", "trainer.optimizer.lr", convert=same),
    ConversionRule(f"{ACTOR}.optim.weight_decay", "trainer.optimizer.weight_decay", "0.01 there, 0 here by default"),
    ConversionRule(f"{ACTOR}.optim.betas", "trainer.optimizer.betas", convert=list),
    ConversionRule(f"{ACTOR}.optim.lr_warmup_steps", "trainer.optimizer.warmup_steps"),
    ConversionRule(f"{ACTOR}.optim.lr_warmup_steps_ratio", "trainer.optimizer.warmup_steps", "times trainer.steps"),
    ConversionRule(f"{ACTOR}.optim.lr_scheduler_type", "trainer.optimizer.schedule", convert=schedule),
    ConversionRule(f"{ACTOR}.grad_clip", "trainer.optimizer.max_grad_norm", convert=same),
    ConversionRule(f"{ACTOR}.clip_ratio", "trainer.loss.args.clip_low, clip_high", "0.2 there by default"),
    ConversionRule(f"{ACTOR}.clip_ratio_low", "trainer.loss.args.clip_low"),
    ConversionRule(f"{ACTOR}.clip_ratio_high", "trainer.loss.args.clip_high"),
    ConversionRule(f"{ACTOR}.clip_ratio_c", "trainer.loss.args.dual_clip", "3 in both by default"),
    ConversionRule(
        f"{ACTOR}.policy_loss.loss_mode", "trainer.loss.name", "vanilla: ppo, gspo: gspo, sapo: sapo, cispo: cispo"
    ),
    ConversionRule(f"{ACTOR}.tau_pos", "trainer.loss.args.tau_positive", "of the loss sapo"),
    ConversionRule(f"{ACTOR}.tau_neg", "trainer.loss.args.tau_negative", "of the loss sapo"),
    ConversionRule(
        f"{ACTOR}.loss_agg_mode", "trainer.aggregation", "token-mean, seq-mean-token-mean, seq-mean-token-sum-norm"
    ),
    ConversionRule(f"{ACTOR}.entropy_coeff", "trainer.loss.entropy_coef", convert=float),
    ConversionRule(f"{ACTOR}.use_kl_loss", "trainer.kl", "place: loss", idle=(False,)),
    ConversionRule(f"{ACTOR}.kl_loss_coef", "trainer.kl.coef"),
    ConversionRule(
        f"{ACTOR}.kl_loss_type", "trainer.kl.estimator", "low_var_kl and k3: k3, kl and k1: k1, mse and k2: k2"
    ),
    ConversionRule("algorithm.use_kl_in_reward", "trainer.kl", "place: reward", idle=(False,)),
    ConversionRule("algorithm.kl_ctrl.kl_coef", "trainer.kl.coef"),
    ConversionRule("algorithm.kl_penalty", "trainer.kl.estimator"),
    ConversionRule(
        "algorithm.adv_estimator", "trainer.advantage.name", "grpo, gae, rloo, reinforce_plus_plus: reinforce_pp"
    ),
    ConversionRule("algorithm.norm_adv_by_std_in_grpo", "trainer.advantage.name", "false: centered"),
    ConversionRule("algorithm.filter_groups.enable", "trainer.advantage.keep_zero_variance", "the opposite"),
    ConversionRule("algorithm.filter_groups.metric", "trainer.advantage.filter_term", "acc: the term that judges"),
    ConversionRule("algorithm.filter_groups.max_num_gen_batches", note="dropped groups are replaced one by one"),
    ConversionRule(f"{CORRECTION}.rollout_rs", "trainer.rejection", "the modes token_… and seq_mean_…"),
    ConversionRule(f"{CORRECTION}.rollout_rs_threshold", "trainer.rejection", "lower and upper"),
    ConversionRule(f"{CORRECTION}.rollout_is", "trainer.loss.name", "token, without bypass_mode: decoupled_ppo"),
    ConversionRule(f"{CORRECTION}.rollout_is_threshold", "trainer.loss.args.weight_limit", "of decoupled_ppo"),
    ConversionRule(f"{CORRECTION}.bypass_mode", note="always: ratios are to the generators' own log-probabilities"),
    ConversionRule(f"{CORRECTION}.loss_type", "trainer.loss.name", "with bypass_mode; ppo_clip: ppo, else reinforce"),
    ConversionRule(f"{CORRECTION}.*", note="weights are not normalized over the batch"),
    ConversionRule("algorithm.gamma", "trainer.advantage.args.gamma", "of gae and reinforce_pp"),
    ConversionRule("algorithm.lam", "trainer.advantage.args.lam", "of gae"),
    ConversionRule("critic.optim.lr", "trainer.critic.optimizer.lr", "with adv_estimator gae"),
    ConversionRule("critic.cliprange_value", "trainer.critic.clip", "with adv_estimator gae"),
    ConversionRule("critic.model.path", "trainer.critic.model", "with adv_estimator gae"),
    ConversionRule(
        f"{MODEL}.enable_gradient_checkpointing", "trainer.activation_checkpointing", "on there by default", same
    ),
    ConversionRule(f"{MODEL}.enable_activation_offload", "trainer.activation_offload", convert=same),
    ConversionRule(f"{MODEL}.lora_rank", "trainer.lora.rank", "0: no adapter", idle=(0,)),
    ConversionRule(f"{MODEL}.lora_alpha", "trainer.lora.alpha"),
    ConversionRule(f"{MODEL}.target_modules", "trainer.lora.targets", "all-linear is the default"),
    ConversionRule(f"{MODEL}.use_remove_padding", note="always: rows are packed"),
    ConversionRule(f"{MODEL}.use_liger", note="logits are never held whole, without a kernel"),
    ConversionRule(f"{ROLLOUT}.n", "sampling.n", "1 there by default, 8 here"),
    ConversionRule(f"{ROLLOUT}.temperature", "sampling.temperature", convert=float),
    ConversionRule(f"{ROLLOUT}.top_p", "sampling.top_p", "below 1 only with generator.allow_truncated"),
    ConversionRule(f"{ROLLOUT}.top_k", "sampling.top_k", "not -1 only with generator.allow_truncated"),
    ConversionRule(f"{ROLLOUT}.name", "generator.engine", "vllm; sglang: http with the dialect sglang"),
    ConversionRule(f"{ROLLOUT}.gpu_memory_utilization", "generator.args.gpu_memory_utilization", convert=same),
    ConversionRule(f"{ROLLOUT}.tensor_model_parallel_size", "generator.args.tensor_parallel_size", convert=same),
    ConversionRule(f"{ROLLOUT}.data_parallel_size", "generator.replicas", convert=same),
    ConversionRule(f"{ROLLOUT}.max_num_batched_tokens", "generator.args.max_num_batched_tokens", convert=same),
    ConversionRule(f"{ROLLOUT}.enable_chunked_prefill", "generator.args.enable_chunked_prefill", convert=same),
    ConversionRule(f"{ROLLOUT}.max_model_len", note="model.max_length is the bound, of prompt and completion"),
    ConversionRule(f"{ROLLOUT}.engine_kwargs.*", "generator.args", "those of vllm or sglang by their own names"),
    ConversionRule(f"{ROLLOUT}.enable_rollout_routing_replay", "trainer.router_replay", convert=same),
    ConversionRule(f"{ROLLOUT}.calculate_log_probs", note="always"),
    ConversionRule(f"{TURNS}.tool_config_path", "generator.workflow.args.tools", "see below"),
    ConversionRule(f"{TURNS}.interaction_config_path", "generator.workflow.name", "environment, one of your own"),
    ConversionRule(f"{TURNS}.max_assistant_turns", "generator.workflow.args.max_calls"),
    ConversionRule(f"{TURNS}.max_user_turns", "generator.agents.max_calls", "one more; of interactions"),
    ConversionRule(f"{TURNS}.max_parallel_calls", "generator.workflow.args.parallel", "1 there by default, 4 here"),
    ConversionRule(f"{TURNS}.max_tool_response_length", "generator.workflow.args.longest_result"),
    ConversionRule(f"{TURNS}.format", "generator.agents.tool_parser", convert=same),
    ConversionRule(f"{TURNS}.enable", "generator.workflow.name", "tools; without a tool single_turn", idle=(False,)),
    ConversionRule(f"{ROLLOUT}.agent.default_agent_loop", "generator.workflow.name", "tool_agent: tools"),
    ConversionRule(f"{ROLLOUT}.agent.agent_loop_config_path", "generator.workflow.name", "agent or one of your own"),
    ConversionRule(f"{ROLLOUT}.agent.num_workers", note="episodes share the event loop of a generator"),
    ConversionRule(f"{ROLLOUT}.enforce_eager", "generator.args.enforce_eager", convert=same),
    ConversionRule(f"{ROLLOUT}.max_num_seqs", "generator.max_samples", convert=same),
    ConversionRule(f"{ROLLOUT}.val_kwargs.temperature", "eval.sampling.temperature"),
    ConversionRule(f"{ROLLOUT}.val_kwargs.n", "eval.sampling.n"),
    ConversionRule(f"{ROLLOUT}.val_kwargs.top_p", "eval.sampling.top_p"),
    ConversionRule(f"{ROLLOUT}.val_kwargs.top_k", "eval.sampling.top_k"),
    ConversionRule(f"{ROLLOUT}.val_kwargs.do_sample", "eval.sampling.temperature", "false: 0"),
    ConversionRule("actor_rollout_ref.ref.fsdp_config.param_offload", "trainer.kl.device", "true: cpu"),
    ConversionRule(f"{ACTOR}.fsdp_config.param_offload", note="weights that are trained stay on the GPU, sharded"),
    ConversionRule(f"{ACTOR}.fsdp_config.optimizer_offload", note="the optimizer stays on the GPU, sharded"),
    ConversionRule("custom_reward_function.path", "reward.terms", "compute_score works as it is"),
    ConversionRule("custom_reward_function.name", "reward.terms"),
    ConversionRule("custom_reward_function.reward_kwargs.*", "reward.terms.N.args", "those of the function"),
    ConversionRule("reward_model.enable", "reward.terms", "the term reward_model", idle=(False,)),
    ConversionRule("reward_model.model.path", "reward.terms.N.args.path", "with reward_model.enable"),
    ConversionRule(f"{OVERLONG}.overlong_buffer_cfg.enable", "reward.terms", "the term length", idle=(False,)),
    ConversionRule(f"{OVERLONG}.overlong_buffer_cfg.len", "reward.terms.N.args.overlong_buffer"),
    ConversionRule(f"{OVERLONG}.overlong_buffer_cfg.penalty_factor", "reward.terms.N.args.factor"),
    ConversionRule(f"{OVERLONG}.overlong_buffer_cfg.log", note="terms are always logged one by one"),
    ConversionRule(f"{OVERLONG}.max_resp_len", "reward.terms.N.args.max_tokens", "of the term length"),
    ConversionRule("data.image_key", "train.args.image", "model.kind is vision"),
    ConversionRule(f"{ACTOR}.freeze_vision_tower", "model.freeze_vision", "false there by default"),
    ConversionRule("data.seed", "run.seed", convert=same),
    ConversionRule("data.custom_cls.*", "train.name", "a class of your own"),
    ConversionRule("data.return_raw_chat", note="prompts are always kept as they are"),
    ConversionRule("data.trust_remote_code", note="model.trust_remote_code is for the tokenizer as well"),
    ConversionRule("data.sampler.*", note="train.curriculum chooses prompts by how often they were solved"),
    ConversionRule(f"{ACTOR}.ulysses_sequence_parallel_size", "trainer.parallel.context", "not with images"),
    ConversionRule(f"{ACTOR}.use_torch_compile", note="of the entropy there; trainer.compile compiles the layers"),
    ConversionRule("trainer.total_training_steps", "trainer.steps", convert=same),
    ConversionRule("trainer.total_epochs", "trainer.steps", "epochs times prompts divided by batch_groups"),
    ConversionRule(
        "trainer.n_gpus_per_node", "trainer.processes", "GPUs of the trainer only; generators need their own"
    ),
    ConversionRule("trainer.nnodes", "trainer.processes", "times n_gpus_per_node"),
    ConversionRule("trainer.experiment_name", "run.name", "lower case, with - for other characters"),
    ConversionRule("trainer.logger", "trainer.trackers", "console is always there"),
    ConversionRule("trainer.save_freq", "trainer.checkpoint.every", convert=lambda every: every if every > 0 else None),
    ConversionRule("trainer.max_actor_ckpt_to_keep", "trainer.checkpoint.keep", convert=same),
    ConversionRule("trainer.test_freq", "eval.every"),
    ConversionRule("trainer.log_val_generations", "trainer.log_completions", convert=same),
    ConversionRule("trainer.project_name", "trainer.tracking.project", convert=same),
    ConversionRule("trainer.val_before_train", note="the first and the last version are always evaluated"),
    ConversionRule("trainer.critic_warmup", note="policy and critic are trained from the first step"),
    ConversionRule(
        "trainer.resume_mode", note="tidemill up resumes from the newest checkpoint; --fresh starts from the beginning"
    ),
    ConversionRule("trainer.default_local_dir", note="files of a run are in runs/NAME; run.folder names another place"),
    ConversionRule(
        "data.filter_overlong_prompts", note="a prompt that leaves no room for an answer is failed and counted"
    ),
    ConversionRule("data.truncation", note="prompts are never cut"),
    ConversionRule("data.val_batch_size", note="evaluation goes through the same generators, in any order"),
    ConversionRule("reward_model.reward_manager", note="every reward term is a function of one sample"),
    ConversionRule("reward_model.*", note="rewards are computed by services of their own"),
    ConversionRule("critic.*", note="the critic is trained like the policy, in the same ranks"),
    ConversionRule(f"{ACTOR}.megatron.*", note=SHARDED),
    ConversionRule(f"{ACTOR}.fsdp_config.*", note=SHARDED),
    ConversionRule(f"{ACTOR}.profiler.*", note=PROFILES),
    ConversionRule(f"{ACTOR}.optim.override_optimizer_config.*", note=SHARDED),
    ConversionRule("actor_rollout_ref.ref.*", note="trainer.kl.device says where the reference model is"),
    ConversionRule("global_profiler.*", note=PROFILES),
    *(
        ConversionRule(f"{ACTOR}.{key}", note=MEMORY)
        for key in ("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu")
    ),
    *(
        ConversionRule(f"{ROLLOUT}.log_prob_{key}", note=MEMORY)
        for key in ("micro_batch_size", "micro_batch_size_per_gpu", "max_token_len_per_gpu", "use_dynamic_bsz")
    ),
    *(
        ConversionRule(f"{ROLLOUT}.{key}", note=SEPARATE)
        for key in ("mode", "free_cache_engine", "load_format", "layered_summon", "multi_stage_wake_up")
    ),
    ConversionRule("--config-name", note="verl's own defaults; those that decide what is trained are written out"),
    ConversionRule("--config-path", note="see --config-name"),
)
LOSSES = {"vanilla": "ppo", "gspo": "gspo", "sapo": "sapo", "cispo": "cispo"}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "constant",
}
ADVANTAGES = {"grpo": "grpo", "gae": "gae", "rloo": "rloo", "reinforce_plus_plus": "reinforce_pp"}
ADVANTAGES |= {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
ESTIMATORS = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
REWARDS = {"gsm8k": "gsm8k", "geo3k": "geometry3k", "geometry3k": "geometry3k", "clevr": "clevr", "code": "code"}
"""The rule for data whose file has this word in its path; math for others."""
SGLANG = {"gpu_memory_utilization": "mem_fraction_static", "enforce_eager": "disable_cuda_graph"}
"""Options of SGLang by vLLM's name."""
