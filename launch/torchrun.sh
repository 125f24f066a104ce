# shellcheck shell=bash
# run_torchrun: torchrun, started so that SIGUSR1 and SIGTERM reach the ranks, which finish their step, save and exit 0.
# Sourced after environment.sh, not run by itself.
#
# torchrun must not see these signals: SIGUSR1 would end it, and after SIGTERM it gives its ranks 30 seconds. So it ignores
# them, and this shell hands them to the ranks itself, again and again, since ranks that are still starting ignore them too.
# Returns torchrun's exit code; in place of 0, STOPPED_CODE (0) where a signal came, for schedulers that must tell a run
# that was stopped from one that is finished.
#
# check_flags: end with one line where the pipeline's flags are wrong, before torchrun starts and restarts ranks for it.
check_flags() {
    "$python" -c 'import sys, train_dflash_pipeline as pipeline
try:
    pipeline.parse_arguments()
except pipeline.UserError as error:
    sys.exit(f"error: {error}")' "$@" || exit
}

run_torchrun() {
    local agent code=0
    stopped=""
    trap '' USR1 TERM
    PET_SIGNALS_TO_HANDLE=SIGINT,SIGHUP,SIGQUIT "$python" -m torch.distributed.run "$@" &
    agent=$!
    trap 'stopped=1; stop_ranks "$agent" &' USR1 TERM
    trap : INT # Ctrl-C is torchrun's to pass on
    while kill -0 "$agent" 2>/dev/null; do
        wait "$agent" || true # a signal ends the wait, too
    done
    wait "$agent" || code=$?
    trap - USR1 TERM INT
    if [ "$code" = 0 ] && [ -n "$stopped" ]; then
        code="${STOPPED_CODE:-0}"
    fi
    return "$code"
}

# SIGUSR1 to every child of torchrun until that is gone.
stop_ranks() {
    while kill -0 "$1" 2>/dev/null; do
        "$python" -c 'import signal, sys, psutil
for rank in psutil.Process(int(sys.argv[1])).children():
    rank.send_signal(signal.SIGUSR1)' "$1" 2>/dev/null || true
        sleep 2
    done
}
