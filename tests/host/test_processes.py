"""A rank that waits in vain tells whose processes do nothing any more, and undoes nothing that would wait for them."""

import os
import signal
import subprocess
import sys

import pytest

from nbep.host.ranks.timeouts import PeerTimeout, Process, Undo, _status, who_is_gone

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


@on_linux
def test_processes_that_have_ended_or_are_stopped_are_distinguished_from_those_that_run():
    own = Process.own()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        other = Process(own.host, child.pid, _status(child.pid)[19])
        assert str(who_is_gone([own, other])) == ""
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert str(who_is_gone([own, other])) == "rank 1 is stopped"
        child.kill()
        child.wait()
    gone = who_is_gone([own, other, other])
    assert (bool(gone), gone.ended, str(gone)) == (True, [1, 2], "ranks 1, 2 have ended")


@on_linux
def test_a_number_that_is_used_again_is_another_process():
    own = Process.own()
    assert who_is_gone([own, own._replace(started="0")]).ended == [1]


def test_nothing_is_said_of_processes_of_other_hosts():
    own = Process.own()
    assert not who_is_gone([own._replace(host="elsewhere", started="0"), own._replace(host="", started="0")])


def undone(what, inside=lambda: None):
    """What is undone if `inside` runs inside, and an error ends it: by name, in order."""
    done = []

    def called(name, call):
        done.append(name)
        call()

    def run():
        with Undo() as undo:
            for name, call in what.items():
                undo.callback(called, name, call)
            inside()

    with pytest.raises((PeerTimeout, ZeroDivisionError)):
        run()
    return done


def wait_in_vain():
    raise PeerTimeout("rank 0: rank 1 did not come", 0, 1, "construction")


def test_after_a_rank_did_not_come_nothing_more_is_undone():
    assert undone({"first": int, "wait": wait_in_vain, "last": int}) == ["last", "wait"]
    assert undone({"made": int}, inside=wait_in_vain) == []


def test_after_another_error_all_is_undone():
    assert undone({"first": int, "wrong": lambda: 1 // 0, "last": int}) == ["last", "wrong", "first"]
    assert undone({"made": int}, inside=lambda: 1 // 0) == ["made"]
