"""The prepare run: where markers lie, and what it says of a sandbox that offers less."""

from __future__ import annotations

import pytest

from fence.errors import InvalidReport
from tests.lineage._shells import NOBODY, Box

PRIVATE = "mount -t tmpfs none /tmp; mount -t tmpfs none /var/tmp; mount -t tmpfs none /dev/shm; "

FULL = (
    "umount /tmp; mount -t tmpfs -o size=4k none /tmp; mkdir -p /tmp/.fence; "
    "head -c 4096 /dev/zero >/tmp/full; "
)


def inside(script: str) -> list[str]:
    """Run the rest of an argv in a mount namespace of its own, after `script`."""
    return ["unshare", "--mount", "sh", "-c", f'{script} exec "$@"', "sh"]


def test_modes_of_the_directories(one: Box) -> None:
    """1777 for all, 0711 to pass through, 0700 for the own markers."""
    look = 'stat -c "%a %n" /tmp/.fence /tmp/.fence/0 /tmp/.fence/0/*'
    output = one.control(
        ["sh", "-c", f'"$@" >/dev/null; {look}', "sh", *_prepare_words(one)], inside(PRIVATE)
    )
    modes = [line.split()[0] for line in output.stdout.decode().splitlines()]
    assert modes == ["1777", "711", "700"]


def _prepare_words(box: Box) -> list[str]:
    from fence.lineage import marks

    return marks.prepare_argv(box.turn, "run")


@pytest.mark.parametrize(
    ("trouble", "expected"),
    [
        ("mount -o remount,ro /tmp; ", "/var/tmp/.fence"),
        ("ln -s /var/tmp /tmp/.fence; ", "/var/tmp/.fence"),
        ("touch /tmp/.fence; ", "/var/tmp/.fence"),
        ("mkdir /tmp/.fence; chown 1234 /tmp/.fence; ", "/var/tmp/.fence"),
        ("umount /tmp; mount -t tmpfs -o nr_inodes=2 none /tmp; ", "/var/tmp/.fence"),
        (FULL, "/var/tmp/.fence"),
        ("mount -o remount,ro /tmp; mount -o remount,ro /var/tmp; ", "/dev/shm/.fence"),
    ],
)
def test_takes_the_next_place_where_one_cannot_be_used(
    one: Box, trouble: str, expected: str
) -> None:
    """Read-only, a symlink, a file, another user's, no inode, no byte left."""
    prepared = one.prepare(inside(PRIVATE + trouble))
    assert prepared.directory == expected
    assert any("/tmp/.fence cannot be used" in note for note in prepared.notes)


def test_refuses_where_no_place_is_left(one: Box) -> None:
    everywhere = "".join(f"mount -o remount,ro {p}; " for p in ("/tmp", "/var/tmp", "/dev/shm"))
    with pytest.raises(InvalidReport, match="no directory for markers"):
        one.prepare(inside(PRIVATE + everywhere))


def test_noexec_does_not_matter(one: Box) -> None:
    prepared = one.prepare(inside("mount -t tmpfs -o noexec none /tmp; "))
    assert prepared.directory == "/tmp/.fence"


def test_says_unbranded_where_a_limit_is_set(box: Box) -> None:
    """A limit that is there is the user's or an outer fence's."""
    for limit in ("5000:unlimited", "90000:90000"):
        prepared = box.prepare(["prlimit", f"--cpu={limit}"])
        assert (prepared.containment, prepared.brand) == ("lineage-unbranded", False)
        assert prepared.notes


def test_says_own_uid_where_proc_hides_others(one: Box) -> None:
    hidden = inside("mount -t proc -o hidepid=2 none /proc; ")
    assert one.prepare(hidden).containment == "lineage", "root sees everybody"
    one.uid = NOBODY
    assert one.prepare(hidden).containment == "own-uid"
    assert one.prepare().containment == "lineage"


def test_an_ordinary_user_can_share_roots_directory(box_of_user: Box) -> None:
    assert box_of_user.prepare().directory == "/tmp/.fence"


def test_old_tombstones_go_young_ones_stay(one: Box) -> None:
    """A day; by the file's own time."""
    before = (
        "mkdir -m 1777 /tmp/.fence; touch -d '-26 hours -25 hours' /tmp/.fence/a.cancelled; "
        "touch -d '-23 hours' /tmp/.fence/b.cancelled; "
    )
    output = one.control(
        ["sh", "-c", '"$@" >/dev/null; ls /tmp/.fence', "sh", *_prepare_words(one)],
        inside(PRIVATE + before),
    )
    assert output.stdout.split() == [b"0", b"b.cancelled"]
