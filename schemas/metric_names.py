"""The metrics of a run by name, and what each tells you. Docs and the dashboard show this table.

A name with ``{}`` stands for all that have something in its place. What a step logs is in here, which a test checks.
"""

import re
from functools import cache

METRICS: dict[str, str] = {
    "reward/mean": "Mean reward of the step's samples, after groups were filtered: not the share that was solved.",
    "reward/std": "Standard deviation of these rewards; near 0 there is nothing to learn from.",
    "reward/min": "Lowest reward of the step's samples.",
    "reward/max": "Highest reward of the step's samples.",
    "reward/unfiltered_mean": "Mean reward of all samples that came back since the last step, of filtered groups too:"
    " with rewards of right and wrong the share that was solved. The curve to judge training by, beside evaluations.",
    "reward/{}/mean": "Mean of a term of the reward, by its label, before its weight: which term moves the sum.",
    "reward/{}/std": "Standard deviation of a term.",
    "episode/{}": "Mean of a number that the workflow gives as a metric, over the samples that have it;"
    " 64 names of up to 64 characters, chosen by how many samples have them.",
    "eval/{}": "Results of an evaluation on held-out prompts (reward, length, and its weight version), in the line of"
    " the first step after it was complete that has no other; trackers get them at once.",
    "eval/{}/accuracy": "Share of correct samples of an evaluated dataset, the mean over all samples of a prompt.",
    "eval/{}/pass@{}": "Share of its prompts of which one of k samples is correct, without bias (Chen et al. 2021).",
    "eval/{}/reward": "Mean reward of its samples.",
    "eval/{}/length": "Mean loss tokens of its samples.",
    "data/{}/groups": "Groups of a dataset of train that came back since the last step, before the filter.",
    "data/{}/reward_mean": "Mean reward of their samples.",
    "data/{}/solve_rate": "Share of correct samples among them: which part of a mixture learns.",
    "data/{}/solve_none": "Number of these groups without a correct sample.",
    "data/{}/solve_all": "Number of these groups with only correct samples.",
    "data/{}/level_{}/solve_rate": "The same share at one level of difficulty. The other metrics of a dataset exist for"
    " each of its levels, too.",
    "data/skipped_fraction": "Share of all positions of the prompt order so far that the curriculum skipped.",
    "data/prompts_seen": "Prompts (or levels) that a curriculum has statistics of, at the last checkpoint.",
    "data/prompts_unsolved": "Number of these prompts without a correct sample in their last groups.",
    "data/prompts_solved": "Number of these prompts with only correct samples in their last groups.",
    "groups/complete": "Prompt groups that came back since the last step.",
    "groups/zero_variance_fraction": "Share of them in which all samples have the same reward.",
    "groups/solve_none_fraction": "Share of them in which no sample has a reward above 0: prompts that are too hard.",
    "groups/solve_all_fraction": "Share of them in which every sample has a reward of 1 or more: prompts that are too"
    " easy.",
    "groups/filtered_fraction": "Share of them that was dropped because it would teach nothing: wasted generation.",
    "groups/dropped": "Groups that ended without being trained since the last step.",
    "groups/dropped_{}": "The same by reason: zero_variance, mean_reward, partial, stale, no_reward, no_tokens,"
    " not_finite, mismatch, unrewarded.",
    "samples/failed": "Samples that no generator could finish, of groups that came back since the last step.",
    "samples/failed_{}": "The same by kind: of agents raised, died, neighbour, late and no_call; unrewarded, of live"
    " conversations; of all not_finite, for log-probabilities that are not finite, and workflow, for a workflow that"
    " raised.",
    "samples/unscored": "Samples whose reward failed, of groups that came back since the last step.",
    "samples/excluded": "Samples without a reward in the groups that were trained.",
    "train/loss": "The loss. It says little by itself: look at reward, entropy and kl.",
    "train/tokens": "Loss tokens of the step.",
    "train/samples": "Samples of the step.",
    "train/entropy": "Mean entropy of the policy at its tokens, nats: a fall to 0 is collapse, a rise is noise.",
    "train/entropy_std": "Its standard deviation over tokens.",
    "train/grad_norm": "Norm of the gradient before it was clipped; peaks come before trouble.",
    "train/lr": "Learning rate of the step.",
    "train/skipped": "Share of the step's updates that changed no weight, because loss or gradient was not finite. A"
    " step without an update counts, and makes a version with the same weights as the one before; ten in a row end the"
    " run.",
    "train/loss_scale": "Factor on the loss in float16.",
    "train/loss_{}": "Mean over tokens of what a loss gives as a metric.",
    "train/kl": "Estimate (k3) of the divergence between the policy that sampled and the one in training: grows with"
    " staleness and learning rate.",
    "train/kl_masked": "The same over the tokens that the loss leaves out.",
    "train/kl_unmasked": "The same over the tokens that it keeps.",
    "train/reference_kl": "Divergence from the reference policy, by the estimator of trainer.kl. If teachers are the"
    " reference: over the tokens that have one.",
    "train/taught_fraction": "Share of tokens that have a teacher.",
    "train/supervised_loss": "Mean cross-entropy of the tokens of given answers, in nats.",
    "train/supervised_tokens": "Tokens of given answers; they count in no other metric of tokens.",
    "train/ratio_mean": "Mean probability ratio of policy and rollout policy; 1 when they agree.",
    "train/ratio_std": "Its standard deviation.",
    "train/ratio_min": "The smallest ratio of a token.",
    "train/ratio_p01": "1 % of the tokens have a lower ratio.",
    "train/ratio_p99": "1 % of the tokens have a higher ratio: what the clip has to hold.",
    "train/ratio_max": "The largest ratio of a token.",
    "train/ess": "Effective sample size that the ratios leave, as a share: 1 when both policies agree.",
    "train/clip_fraction": "Share of tokens whose gradient was clipped to zero.",
    "train/clip_low_fraction": "Share of tokens at the lower bound (negative advantage).",
    "train/clip_high_fraction": "Share of tokens at the upper bound (positive advantage).",
    "train/clip_dual_fraction": "Share of tokens at the dual clip (negative advantage, large ratio).",
    "train/masked_fraction": "Share of tokens that the loss leaves out.",
    "train/rejected_fraction": "Share of tokens that a rule of trainer.rejection excludes.",
    "train/logprob_gap_mean": "Difference of log-probabilities, generator against trainer, where both had the same"
    " weights: it should be tiny. Left out in a step without such tokens.",
    "train/logprob_gap_max": "The largest of these differences.",
    "train/logprob_gap_tokens": "Tokens that it was measured on.",
    "mismatch/{}/gap": "Mean difference of log-probabilities, trainer against this generator, over its tokens of the"
    " step; of the 32 generators with the largest. One far from the others is quarantined, see trainer.mismatch.",
    "mismatch/{}/kl": "Mean divergence (k3) of the two on these tokens.",
    "mismatch/{}/tokens": "Number of these tokens.",
    "mismatch/{}/age_{}/gap": "The same over tokens of samples whose oldest token is so many versions older than the"
    " step's: at age 0 it should be tiny. The other two metrics exist for each age, too.",
    "pool/{}/gap": "Mean difference of log-probabilities, trainer against this pool's generators, over their tokens of"
    " the step.",
    "pool/{}/kl": "Mean divergence (k3) of the two on these tokens.",
    "pool/{}/tokens": "Number of these tokens: what each pool gives to training.",
    "pool/{}/age_{}/gap": "The same by the age of a sample, as of a generator; the other two metrics exist, too.",
    "train/advantage_abs_mean": "Mean size of the samples' advantages.",
    "train/advantage_mean": "Mean advantage of a token.",
    "train/advantage_std": "Its standard deviation.",
    "train/advantage_min": "The lowest advantage of a token.",
    "train/advantage_max": "The highest advantage of a token.",
    "train/advantage_positive_fraction": "Share of tokens with a positive advantage, which become more likely.",
    "train/advantage_zero_fraction": "Share of tokens without a gradient.",
    "train/length_mean": "Loss tokens of a sample, over all its rows: the mean.",
    "train/length_min": "The shortest.",
    "train/length_median": "The median.",
    "train/length_p95": "95th percentile.",
    "train/length_max": "The longest.",
    "train/length_better_mean": "Mean length of samples with a reward above their group's mean.",
    "train/length_worse_mean": "Mean length of those below it: a growing difference rewards length.",
    "train/length_terminated_mean": "Mean length of samples that did not end at a limit.",
    "train/temperature": "Mean sampling temperature of the step's rows; it follows a change after some versions.",
    "train/truncated_fraction": "Share of samples that ended at a limit of tokens, calls or time.",
    "train/rows_mean": "Mean rows of a sample, see algorithms.",
    "train/rows_max": "The most rows of a sample.",
    "train/row_tokens_mean": "Tokens of all rows of a sample that the model reads in training, prompts and shared"
    " beginnings too.",
    "train/micro_batches": "Micro-batches of a rank.",
    "train/shared_tokens_fraction": "Tokens that are computed together with those of another row, as a share of all.",
    "train/imbalance": "Work of the busiest rank divided by the mean, minus 1.",
    "train/expert_load_max": "For a mixture of experts: tokens of the busiest expert divided by the mean of its layer,"
    " in the worst layer; 1 is even.",
    "train/experts_unused": "Share of experts without a token in the step.",
    "train/experts_changed": "Share of the replayed choices of experts (trainer.router_replay) that the trainer's"
    " routers would not have made.",
    "train/critic_loss": "Loss of the critic.",
    "train/critic_error": "Root mean square of return minus value, divided by that of the returns; 1 for a critic"
    " that is always 0.",
    "train/critic_explained_variance": "Share of the returns' variance that the critic explains: 1 is perfect, 0 a"
    " constant, below 0 harmful.",
    "train/critic_grad_norm": "Norm of the critic's gradient.",
    "train/critic_lr": "Learning rate of the critic.",
    "train/q_mean": "SAC: the mean of both Q networks over the drawn transitions.",
    "train/alpha": "SAC: the weight of the entropy, which is tuned.",
    "train/updates": "SAC: updates of the step.",
    "train/buffer": "SAC: transitions in the replay buffer.",
    "train/critic_loss_scale": "Factor on the critic's loss in float16.",
    "staleness/mean": "Age of the loss tokens, in weight versions: the mean.",
    "staleness/max": "The oldest; never above flow.staleness.",
    "staleness/histogram": "Loss tokens by age; a tracker gets staleness/histogram/AGE for each age.",
    "perf/tokens_per_s": "Loss tokens of the step by its time without pauses.",
    "perf/generated_tokens_per_s": "Tokens of published samples, of all generators, since the step before.",
    "perf/tflops_per_device": "Floating-point operations of the step, 10^12 a second and device, while it computed.",
    "perf/mfu": "The same as a share of the device's peak (model FLOPs utilization), where that is known.",
    "perf/memory_bytes": "Main memory of the trainer's rank 0.",
    "perf/memory_peak_bytes": "The most that it has had.",
    "perf/shared_gpu_share": "Share of its time in which the trainer has had the GPUs that it shares with generators.",
    "perf/hand_over_{}_s": "Seconds of the last hand-over's part: offload, then wait for the generators, and onload.",
    "perf/gpu_memory_peak_bytes": "The most memory of rank 0's GPU in this step.",
    "time/total_s": "Seconds since the line before, without pauses; the other times but time/paused_s add up to it.",
    "time/wait_s": "Waiting for a batch: most of the step means that generation is the bottleneck.",
    "time/paused_s": "Ordered pauses before the step; no part of time/total_s.",
    "time/hand_over_s": "Giving GPUs to the generators that share them and taking them back, their sleep included.",
    "time/assemble_s": "Planning the step and sharing it out.",
    "time/prepare_s": "Passes without a gradient: reference, values, proximal policy.",
    "time/forward_s": "Forward passes.",
    "time/backward_s": "Backward passes.",
    "time/optimizer_s": "Reducing metrics, clipping, and the optimizer.",
    "time/critic_s": "Training the critic.",
    "time/record_s": "Recording the batch.",
    "time/publish_s": "Publishing the weights.",
    "time/checkpoint_s": "Waiting for the previous checkpoint.",
    "time/other_s": "All other time.",
    "step": "Number of the optimizer step.",
    "version": "Weight version that the step made.",
    "wall_s": "Seconds since the run began.",
    "trajectories": "Samples of the step.",
}


def describe(name: str) -> str:
    """Return the description of a metric; "" for a metric that is not in the table, such as a user's own."""
    if name in METRICS:
        return METRICS[name]
    return next((text for pattern, text in _patterns() if pattern.fullmatch(name)), "")


@cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    """Return patterns of the names with a gap, the longest first."""
    gaps = sorted((name for name in METRICS if "{}" in name), key=len, reverse=True)
    return [(re.compile(re.escape(name).replace(r"\{\}", ".+")), METRICS[name]) for name in gaps]
