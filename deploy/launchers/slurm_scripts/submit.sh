#!/bin/bash
# Queues the run $run: what makes its model, if the configuration says how, then everything else at once.
# More generators later: sbatch --array=N-M $folder/$generators. To stop: scancel --me --name with a job's name,
# as squeue --me shows it. Submit it again to resume the run.
set -euo pipefail
[ "$own_broker" = no ] || rm -f $folder/redis_url
$queue_prepare
sbatch $$after $folder/services.sbatch
sbatch $$after $folder/trainer.sbatch
$queue_generators
