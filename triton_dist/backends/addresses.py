"""Addresses of this host that other hosts can reach."""

import os
import socket

from ..errors import ShmemError

BOOTSTRAP = -6  # see shmem.codes


def own_address(loopback):
    """This host's IPv4 address: of SHMEM_UID_SOCK_IFNAME's interface when set, else loopback or the host name's."""
    interface = os.environ.get("SHMEM_UID_SOCK_IFNAME", "").partition(":")[0]
    if interface:
        import fcntl
        import struct

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", interface.encode()[:15]))  # SIOCGIFADDR
            except OSError as error:
                raise ShmemError(f"SHMEM_UID_SOCK_IFNAME={interface!r} has no IPv4 address", BOOTSTRAP) from error
        return socket.inet_ntoa(found[20:24])
    return "127.0.0.1" if loopback else socket.gethostbyname(socket.gethostname())


def free_port(host):
    """A TCP port that nobody listens on at this moment."""
    with socket.create_server((host, 0)) as listener:
        return listener.getsockname()[1]
