"""`SharedWeights`: memory for a rank's weights that its standby maps too, on the CPU and on GPUs.

The memory has no name and no owner: it lasts as long as a process has it mapped, so it survives the process that filled
it and none of it is left when the last one ends. On the CPU it is an anonymous file, on CUDA physical memory of the
driver's virtual memory management; of both there is a file descriptor, which one process of a user passes to another
over a Unix socket of the abstract namespace. CUDA's older IPC would need a process that keeps the memory and outlives
all others.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import socket
import struct
import threading
from typing import Any

import torch

ALIGNMENT = 512  # bytes, as PyTorch's allocator does

# Of cuda.h.
_PINNED, _POSIX_FILE, _DEVICE, _READ_WRITE = 1, 1, 1, 3


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class SharedWeights:
    """Parameters one after the other, in the order in which a model makes them: models of one config agree on it.

    First `take` what a model needs, which is counted only, then `allocate` that much, `take` it again and `hand_out`;
    or `adopt` what another process handed out, and `take` that, filled already. On one thread, that of the device.

    is_filled: the weights are those of another process. note: goes with them.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._size = self._taken = 0
        self._fd = -1
        self._map: mmap.mmap | None = None
        self._address = 0  # on CUDA
        self.is_filled = False
        self.note = b""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The next tensor; before there is memory, one on "meta" that is only counted."""
        num_bytes, offset = math.prod(shape) * dtype.itemsize, self._taken
        self._taken += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if self._fd < 0:
            return torch.empty(shape, dtype=dtype, device="meta")
        if self._taken > self._size:
            raise RuntimeError(f"a model of more than the {self._size} bytes that were counted")
        if self._map is not None:
            flat = torch.frombuffer(self._map, dtype=torch.uint8, count=num_bytes, offset=offset)
        else:
            flat = torch.as_tensor(_Span(self._address + offset, num_bytes), device=self._device)
        return flat.view(dtype).view(shape)

    def allocate(self) -> None:
        """Get memory for all that was counted; its contents are undefined."""
        self._size, self._taken = self._taken, 0
        if self._device.type == "cpu":
            self._fd = os.memfd_create("rayllm-weights")
            os.truncate(self._fd, self._size)
            self._map = mmap.mmap(self._fd, self._size)
            return
        properties = _Properties(_PINNED, _POSIX_FILE, _Location(_DEVICE, self._device.index))
        page, handle, fd = ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_int()
        _cuda("cuMemGetAllocationGranularity", ctypes.byref(page), ctypes.byref(properties), 0)
        self._size = -(-self._size // page.value) * page.value
        size = ctypes.c_size_t(self._size)
        _cuda("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), ctypes.c_uint64())
        _cuda("cuMemExportToShareableHandle", ctypes.byref(fd), handle, _POSIX_FILE, ctypes.c_uint64())
        self._fd = fd.value
        self._map_device_memory(handle)

    def hand_out(self) -> bytes:
        """Give the memory to processes of this user that ask for it, from now on; returns where they can."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("")  # the kernel chooses a name, which is no file
        listener.listen()
        threading.Thread(target=self._answer, args=(listener,), name="hand out weights", daemon=True).start()
        name: bytes = listener.getsockname()
        return name

    def adopt(self, name: bytes) -> bool:
        """Map what another process hands out there; False if it is gone."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(name)
                _check_user(connection)
                packed, fds, _flags, _address = socket.recv_fds(connection, 8, 1)
                if not fds:
                    return False
                with connection.makefile("rb") as rest:
                    self.note = rest.read()
        except OSError:
            return False
        (self._fd,), self._size, self._taken = fds, int.from_bytes(packed, "little"), 0
        if self._device.type == "cpu":
            self._map = mmap.mmap(self._fd, self._size)
        else:
            handle = ctypes.c_uint64()
            fd = ctypes.c_void_p(self._fd)
            _cuda("cuMemImportFromShareableHandle", ctypes.byref(handle), fd, _POSIX_FILE)
            self._map_device_memory(handle)
        self.is_filled = True
        return True

    def _map_device_memory(self, handle: ctypes.c_uint64) -> None:
        address, size, zero = ctypes.c_uint64(), ctypes.c_size_t(self._size), ctypes.c_size_t()
        _cuda("cuMemAddressReserve", ctypes.byref(address), size, zero, ctypes.c_uint64(), ctypes.c_uint64())
        _cuda("cuMemMap", address, size, zero, handle, ctypes.c_uint64())
        access = _Access(_Location(_DEVICE, self._device.index), _READ_WRITE)
        _cuda("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
        _cuda("cuMemRelease", handle)  # the mapping and the descriptor hold the memory
        self._address = address.value

    def _answer(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            try:
                with connection:
                    _check_user(connection)
                    socket.send_fds(connection, [self._size.to_bytes(8, "little")], [self._fd])
                    connection.sendall(self.note)
            except OSError:  # of another user, or gone again
                continue


class _Span:
    """Device memory for `torch.as_tensor`."""

    def __init__(self, address: int, num_bytes: int):
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _check_user(connection: socket.socket) -> None:
    """Raise PermissionError unless the other end is a process of this user: names of this namespace have no owner."""
    _pid, user, _group = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        raise PermissionError(f"weights are not for user {user}")


def _cuda(function: str, *args: Any) -> None:
    """Call CUDA's driver. Raises RuntimeError with the driver's words."""
    driver = ctypes.CDLL("libcuda.so.1")
    if error := getattr(driver, function)(*args):
        words = ctypes.c_char_p()
        driver.cuGetErrorString(error, ctypes.byref(words))
        raise RuntimeError(f"CUDA's {function} failed: {(words.value or b'unknown error').decode()} (error {error})")
