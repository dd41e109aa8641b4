"""Settings of TRL's GRPO, RLOO and asynchronous GRPO trainers, and what each becomes, as tables.

Keys are those of TRL 1.16, with the arguments of its trainers and of its command line.
"""

from __future__ import annotations

from typing import Any

from deploy.migrate.conversion import ConversionRule, same

DTYPES = ("float32", "bfloat16", "float16")
NOT_SAMPLED = "not supported: log-probabilities would not be the policy's"
GENERATORS = "generators are services of their own, found through the broker"
MISMATCH = "ratios are taken to the generator's own log-probabilities; add trainer.rejection for a rule"

RULES = (
    ConversionRule("trainer", "trainer.loss.name", "the trainer, by its name without Trainer"),
    ConversionRule("shown_flags", note="how many settings the command in the script's text has"),
    ConversionRule("model", "model.path", convert=same),
    ConversionRule("model_name_or_path", "model.path", convert=same),
    ConversionRule("dtype", "model.dtype", convert=lambda value: value if str(value) in DTYPES else None),
    ConversionRule("trust_remote_code", "model.trust_remote_code", convert=same),
    ConversionRule("vllm_max_model_length", "model.max_length", "prompt and completion together", same),
    ConversionRule("num_generations", "sampling.n", "8 by default, 2 of RLOO"),
    ConversionRule("max_completion_length", "sampling.max_tokens", convert=same),
    ConversionRule("temperature", "sampling.temperature", convert=same),
    ConversionRule("top_p", "sampling.top_p", "below 1 only with generator.allow_truncated"),
    ConversionRule("top_k", "sampling.top_k", "0 becomes -1; else only with generator.allow_truncated"),
    ConversionRule("min_p", note=NOT_SAMPLED),
    ConversionRule("repetition_penalty", note=NOT_SAMPLED),
    ConversionRule("generation_kwargs", note=NOT_SAMPLED),
    ConversionRule(
        "per_device_train_batch_size",
        "trainer.batch_groups",
        "times gradient_accumulation_steps times processes, divided by num_generations: prompts, not completions",
    ),
    ConversionRule(
        "gradient_accumulation_steps", "trainer.batch_groups", "see above; memory is bounded by micro_batch_tokens"
    ),
    ConversionRule("max_steps", "trainer.steps", "divided by the updates of a batch, which it counts"),
    ConversionRule("num_train_epochs", "trainer.steps", "epochs times prompts divided by batch_groups"),
    ConversionRule("num_iterations", "trainer.epochs", convert=same),
    ConversionRule(
        "steps_per_generation", "trainer.batch_groups", "in place of gradient_accumulation_steps; more: minibatches"
    ),
    ConversionRule("generation_batch_size", "trainer.batch_groups", "times num_generations; see steps_per_generation"),
    ConversionRule("learning_rate", "trainer.optimizer.lr", convert=same),
    ConversionRule("lr_scheduler_type", "trainer.optimizer.schedule", "constant, linear, cosine"),
    ConversionRule("warmup_steps", "trainer.optimizer.warmup_steps", "a share of the steps below 1"),
    ConversionRule("warmup_ratio", "trainer.optimizer.warmup_steps", "of older releases; times trainer.steps"),
    ConversionRule("weight_decay", "trainer.optimizer.weight_decay", convert=same),
    ConversionRule("adam_beta1", "trainer.optimizer.betas"),
    ConversionRule("adam_beta2", "trainer.optimizer.betas", "0.999 there, 0.95 here by default"),
    ConversionRule("adam_epsilon", "trainer.optimizer.eps", convert=same),
    ConversionRule("max_grad_norm", "trainer.optimizer.max_grad_norm", convert=same),
    ConversionRule(
        "gradient_checkpointing",
        "trainer.activation_checkpointing",
        "on there; here by default from a billion parameters",
        same,
    ),
    ConversionRule("loss_type", "trainer.loss.name, trainer.aggregation", "see below"),
    ConversionRule("importance_sampling_level", "trainer.loss.name", "sequence becomes gspo"),
    ConversionRule("epsilon", "trainer.loss.args.clip_low"),
    ConversionRule("epsilon_high", "trainer.loss.args.clip_high", "epsilon by default"),
    ConversionRule("delta", "trainer.loss.args.dual_clip", "of the loss ppo"),
    ConversionRule("sapo_temperature_pos", "trainer.loss.args.tau_positive"),
    ConversionRule("sapo_temperature_neg", "trainer.loss.args.tau_negative"),
    ConversionRule("scale_rewards", "trainer.advantage.name", "group: grpo, batch: lite_ppo, none: centered"),
    ConversionRule("beta", "trainer.kl.coef", "in the loss with the estimator k3; of RLOO in the reward"),
    ConversionRule("entropy_coef", "trainer.loss.entropy_coef", convert=same),
    ConversionRule("reward_funcs", "reward.terms", "a function with TRL's arguments works as it is"),
    ConversionRule("reward_weights", "reward.terms.N.weight"),
    ConversionRule("reward_model_name_or_path", "reward.terms", "the term reward_model"),
    ConversionRule("dataset_name", "train.args.path", "train.name is hf"),
    ConversionRule("dataset_config", "train.args.name"),
    ConversionRule("dataset_train_split", "train.args.split", idle=("train",)),
    ConversionRule("data_files", "train.args.path", "train.name is jsonl"),
    ConversionRule("dataset_test_split", "eval.dataset.args.split"),
    ConversionRule("shuffle_dataset", "train.shuffle", convert=same),
    ConversionRule("eval_strategy", "eval"),
    ConversionRule("eval_steps", "eval.every"),
    ConversionRule("num_generations_eval", "eval.sampling.n"),
    ConversionRule("save_steps", "trainer.checkpoint.every", convert=lambda value: int(value) if value >= 1 else None),
    ConversionRule("save_total_limit", "trainer.checkpoint.keep", convert=same),
    ConversionRule("report_to", "trainer.trackers"),
    ConversionRule("log_completions", "trainer.log_completions", "true becomes 8", lambda on: 8 if on else None),
    ConversionRule("run_name", "run.name", "lower case, with - for other characters"),
    ConversionRule("seed", "run.seed", convert=same),
    ConversionRule("use_vllm", "generator.engine", convert=lambda on: "vllm" if on else "transformers"),
    ConversionRule("vllm_gpu_memory_utilization", "generator.args.gpu_memory_utilization", convert=same),
    ConversionRule("vllm_tensor_parallel_size", "generator.args.tensor_parallel_size", convert=same),
    ConversionRule("use_peft", "trainer.lora"),
    ConversionRule("lora_r", "trainer.lora.rank"),
    ConversionRule("lora_alpha", "trainer.lora.alpha"),
    ConversionRule("lora_target_modules", "trainer.lora.targets"),
    ConversionRule("mask_truncated_completions", "trainer.mask_truncated", convert=bool),
    ConversionRule("tools", "generator.workflow.args.tools", "functions, to be moved out of the script that trains"),
    ConversionRule("environment_factory", "generator.workflow", "an environment of your own"),
    ConversionRule("rollout_func", "generator.workflow", "a workflow of your own"),
    ConversionRule("rollout_worker", "generator.workflow", "a workflow of your own"),
    ConversionRule("max_tool_calling_iterations", "generator.workflow.args.max_calls", "one more, for the answer"),
    ConversionRule("max_staleness", "flow.staleness", "4 in both by default", same),
    ConversionRule("max_inflight_tasks", "generator.max_samples", convert=lambda count: count if count > 0 else None),
    ConversionRule("token_budget", "trainer.micro_batch_tokens", convert=same),
    ConversionRule("project", "trainer.tracking.project", convert=same),
    ConversionRule("train_dataset", note="rows that the script makes: write them with to_json, and read them by jsonl"),
    ConversionRule("eval_dataset", "eval.dataset", "with eval_strategy"),
    ConversionRule("args", note="this is not a configuration that the script makes: see what it holds"),
    ConversionRule("callbacks", note="code of the script that trains; events and metrics are in the run's folder"),
    ConversionRule("processing_class", note="the tokenizer is the model's own"),
    ConversionRule("quantization_config", note="the weights that are trained are not quantised"),
    ConversionRule("chat_template_kwargs", note="the chat template is called without arguments"),
    ConversionRule("normalize_advantages", note="of RLOO; trainer.advantage.name grpo divides by the deviation"),
    ConversionRule("reward_clip_range", note="rewards are not clipped: clip them in the function"),
    ConversionRule("vllm_model_impl", note=GENERATORS),
    ConversionRule("weight_sync_steps", note="each step publishes its weights"),
    ConversionRule("queue_maxsize", note="flow.staleness bounds what waits"),
    ConversionRule("save_strategy", note="see trainer.checkpoint"),
    ConversionRule("num_completions_to_print", note="see trainer.log_completions"),
    ConversionRule("trackio_space_id", note="set TRACKIO_SPACE_ID for the tracker trackio"),
    ConversionRule("task_type", note="always a causal language model"),
    ConversionRule("lora_dropout", note="always 0: log-probabilities would differ from the generators'"),
    ConversionRule("vllm_mode", note=GENERATORS),
    ConversionRule("vllm_server_host", note=GENERATORS),
    ConversionRule("vllm_server_port", note=GENERATORS),
    ConversionRule("vllm_server_base_url", note=GENERATORS),
    ConversionRule("vllm_server_timeout", note=GENERATORS),
    ConversionRule("vllm_group_port", note=GENERATORS),
    ConversionRule("vllm_enable_sleep_mode", note=GENERATORS),
    ConversionRule("vllm_importance_sampling_correction", note=MISMATCH),
    ConversionRule("vllm_importance_sampling_mode", note=MISMATCH),
    ConversionRule("vllm_importance_sampling_cap", note=MISMATCH),
    ConversionRule("vllm_importance_sampling_clip_max", note=MISMATCH),
    ConversionRule("vllm_importance_sampling_clip_min", note=MISMATCH),
    ConversionRule("off_policy_mask_threshold", note=MISMATCH),
    ConversionRule("model_revision", note="part of model.path: org/name@revision"),
    ConversionRule("attn_implementation", note="chosen for the model: rows are packed where it can"),
    ConversionRule("disable_dropout", note="always: a policy with dropout would not be the one that sampled"),
    ConversionRule("sync_ref_model", note="the reference model stays as it is"),
    ConversionRule("top_entropy_quantile", note="all tokens are trained"),
    ConversionRule("output_dir", note="files of a run are in runs/NAME; run.folder names another place"),
    ConversionRule("bf16", note="model.dtype is the type of computing; bfloat16 by default"),
    ConversionRule("fp16", note="set model.dtype to float16"),
    ConversionRule("logging_steps", note="every step is logged"),
    ConversionRule("use_liger_kernel", note="logits are never held whole, without a kernel"),
    ConversionRule("push_to_hub", note="tidemill export --push uploads a checkpoint as a model"),
    ConversionRule("ddp_find_unused_parameters", note="the model is sharded by FSDP2"),
)
AGGREGATIONS = {"grpo": "sequence_mean", "sapo": "sequence_mean", "dr_grpo": "constant"}
ADVANTAGES = {"group": "grpo", "true": "grpo", "batch": "lite_ppo", "none": "centered", "false": "centered"}
REWARDS: dict[str, list[dict[str, Any]]] = {
    "accuracy_reward": [{"name": "math"}],
    "think_format_reward": [{"name": "format", "args": {"regex": r"^<think>(?!.*<think>)(.*?)</think>.*$"}}],
    "get_soft_overlong_punishment": [{"name": "length", "args": {"max_tokens": 1280, "overlong_buffer": 256}}],
}
"""TRL's own reward functions, with the arguments that its command line gives them."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "RLOO": {"num_generations": 2, "beta": 0.05},
    "AsyncGRPO": {"max_completion_length": 2048, "lr_scheduler_type": "constant"},
}
"""Defaults of a trainer that differ from those of GRPO."""
