# Read by every job of the run $run: its environment, and how a service is kept running.
#
# Slurm asks a job to end in two ways. SIGTERM comes with scancel and preemption; a preempted job is put back in the
# queue by Slurm. SIGUSR1 comes before the time limit, and then the job puts itself back.
cd $workdir
$setup
RUN=$run
FOLDER=$folder
if [ "$own_broker" = yes ]; then export REDIS_URL_FILE=$$FOLDER/redis_url; unset REDIS_URL; fi
asked=

# Ask the child of keep to end, once for each signal, also if the signal came before there was a child.
pass_on() { if [ -n "$$tell" ] && [ -n "$$child" ]; then tell= && kill -TERM "$$child" 2>/dev/null; fi; }

# keep forward|leave COMMAND...: run a service, again when it fails, until it ends well, is asked to end, or fails in
# a way that no restart mends: 2 is a wrong configuration, 3 another trainer, 6 a run that fails as a whole. With `leave`, SIGTERM is not passed on:
# Slurm sends it to the tasks of srun itself.
keep() {
  local how=$$1 code pause=1 began child= tell=
  shift
  trap 'asked=term; [ "$$how" = leave ] || { tell=yes; pass_on; }' TERM
  trap 'asked=time; tell=yes; pass_on' USR1
  while :; do
    began=$$SECONDS child=
    "$$@" &
    child=$$!
    pass_on
    wait "$$child"; code=$$?
    # A signal ends the wait, not the service.
    while kill -0 "$$child" 2>/dev/null; do wait "$$child"; code=$$?; done
    case $$code in 0|2|3|6) return "$$code" ;; esac
    [ -z "$$asked" ] || return "$$code"
    [ $$((SECONDS - began)) -lt 60 ] || pause=1
    echo "$$1 $$2 ended with exit code $$code, again in $$pause s" >&2
    sleep "$$pause" & wait $$!
    [ -z "$$asked" ] || return "$$code"
    pause=$$((pause < 30 ? 2 * pause : 60))
  done
}

# The services job writes the file once its broker answers.
wait_for_broker() {
  local deadline=$$((SECONDS + 900))
  [ "$own_broker" = yes ] || return 0
  until [ -s "$$REDIS_URL_FILE" ]; do
    [ "$$SECONDS" -lt "$$deadline" ] || { echo "no broker: $$REDIS_URL_FILE was not written within 900 s" >&2; exit 1; }
    sleep 1
  done
}

# Back into the queue, when it was the time limit that ended the job.
again() { [ "$$asked" != time ] || scontrol requeue "$$SLURM_JOB_ID"; }
