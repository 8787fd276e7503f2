#!/bin/bash
# What mpiexec calls in place of ssh: runs a command on the host with that address. See two_hosts.py.
while [[ $1 == -* ]]; do shift; done
address=$1
shift
read -r first second <<<"$NBEP_TWO_HOSTS"
case $address in
    10.77.0.1) namespace=$first name=hosta ;;
    10.77.0.2) namespace=$second name=hostb ;;
    *) echo "no host $address" >&2; exit 1 ;;
esac
exec ip netns exec "$namespace" unshare --uts --ipc --mount --pid --fork --kill-child --mount-proc \
    bash -c "hostname $name; mount -t tmpfs tmpfs /dev/shm; exec $*"
