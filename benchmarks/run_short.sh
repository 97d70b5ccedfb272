#!/bin/sh
# Measures the whole table of targets once: about two minutes on one H200.
#
#   benchmarks/run_short.sh FOLDER
#
# Leaves sleep, large and switch in FOLDER, each as .json and as .txt. Sizes in GiB come
# from the environment, for a try on a small machine, and so do how many processes sleep for
# the first time and the libraries beside this one (ADAPTERS="cumem tms tms-retained"). The
# most important comes first, so that a run that is cut off has it.
set -eu

folder=${1:?where do the results go?}
gib=${GIB:-16}
large_gib=${LARGE_GIB:-64}
kv_gib=${KV_GIB:-64}
many=${MANY:-10000}
pretouch=${PRETOUCH:-18}
large_pretouch=${LARGE_PRETOUCH:-66}
processes=${PROCESSES:-1}
adapters=${ADAPTERS:-cumem}
switch_adapters=${SWITCH_ADAPTERS:-cumem}
here=$(dirname "$0")
python=${PYTHON:-python}
status=0
mkdir -p "$folder"

measure() {
  name=$1
  shift
  "$python" "$here/$@" --rest 0.3 --json "$folder/$name.json" > "$folder/$name.txt" || status=$?
  cat "$folder/$name.txt"
}

measure sleep bench_sleep.py --gib "$gib" --kv-gib "$kv_gib" --many "$many" \
  --pretouch "$pretouch" --processes "$processes" --cycles 3 --row-seconds 4 --adapters $adapters
measure switch bench_switch.py --gib "$gib" --cycles 3 --row-seconds 4 --adapters $switch_adapters
measure large bench_sleep.py --gib "$large_gib" --scenarios later --changed 0 \
  --cycles 2 --row-seconds 4 --pretouch "$large_pretouch"
exit $status
