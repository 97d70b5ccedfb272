// How does a test steer the emulated driver, and what may it ask of it?
//
// These calls have no counterpart in libcuda. They are plain C, so that Python
// reaches them through ctypes. All are thread-safe.
//
// Words. A *machine* is one emulated computer with its own devices; several live
// in one process and none is ever taken down: what belongs to an old machine goes
// on working. Machine 0 is made from CUMEM_EMULATED_CAPACITY (bytes a device,
// default 4 GiB) and CUMEM_EMULATED_DEVICES (default 1), and is current at first.
// A CUdevice is machine * 64 + ordinal. Driver calls that name no object (cuInit,
// cuDeviceGetCount, cuDeviceGet, ...) speak of the current machine; a call that
// names one, or runs under a context, belongs to that object's machine.
//
// Unless said otherwise a function returns 0, or -1 for an unknown machine or
// ordinal (and in a forked child), with nothing changed. Functions that answer
// with a CUresult say so.
//
// A `stream` is a CUstream, or null: the legacy stream of the calling thread's
// context if that context is of this machine, else of the machine's device 0.
#pragma once

#include <stdint.h>

#define CUMEM_EMULATOR_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// What is alive on one machine now. Layout: 18 uint64_t, no padding.
typedef struct cumem_emulator_ledger_t {
  uint64_t handles;  // physical allocations not yet given back (cuMemCreate)
  uint64_t handle_bytes;
  uint64_t mappings;  // cuMemMap
  uint64_t mapped_bytes;
  uint64_t reservations;  // cuMemAddressReserve
  uint64_t reserved_bytes;
  uint64_t host_registrations;
  uint64_t registered_bytes;
  uint64_t streams;  // cuStreamCreate and cumem_emulator_stream_create
  uint64_t events;
  uint64_t plain_allocations;  // cuMemAlloc; in none of the rows above
  uint64_t plain_bytes;
  uint64_t contexts_retained;  // retains not yet released, over all devices
  uint64_t pending_work;       // submitted to any stream and not finished
  uint64_t handle_references;  // cuMemCreate and retains, less cuMemRelease
  uint64_t captures;           // begun and not ended
  uint64_t dead_contexts;      // contexts with a sticky error
  uint64_t modules;            // cuModuleLoadData
} cumem_emulator_ledger_t;

// --- machines ---------------------------------------------------------------

// Makes a machine of `devices` (1 to 64) devices with `capacity_bytes` each,
// rounded down to 2 MiB. Returns its index; the current machine stays. -1 on a
// bad argument.
CUMEM_EMULATOR_API int cumem_emulator_create(uint64_t capacity_bytes, int devices);

// Makes `machine` current for the whole process. Returns the one that was.
CUMEM_EMULATOR_API int cumem_emulator_select(int machine);

// Overrides what cuDeviceGetAttribute says on every device of the machine;
// value -1 makes the attribute unknown (CUDA_ERROR_INVALID_VALUE).
CUMEM_EMULATOR_API int cumem_emulator_set_attribute(int machine, int attribute, int value);

// Copies, fills and digests go over at most this many bytes a second; 0 (the default): no limit.
CUMEM_EMULATOR_API int cumem_emulator_set_bandwidth(int machine, uint64_t bytes_per_second);

// Stream work starts no sooner than this after its submission (default 200), so
// that a missing wait is seen.
CUMEM_EMULATOR_API int cumem_emulator_set_latency(int machine, uint64_t microseconds);

// cuMemHostRegister gives CUDA_ERROR_OUT_OF_MEMORY when more than this would be
// registered on the machine; UINT64_MAX (the default): no limit.
CUMEM_EMULATOR_API int cumem_emulator_set_host_limit(int machine, uint64_t bytes);

// refuse != 0: cuMemHostRegister gives CUDA_ERROR_NOT_PERMITTED; 0: as usual.
CUMEM_EMULATOR_API int cumem_emulator_set_host_refusal(int machine, int refuse);

// --- failures ---------------------------------------------------------------

// The nth (>= 1) call of `call` from now on returns the CUresult `code` and does
// nothing. `call` is unversioned ("cuMemCreate"). Rules add up, each fires once.
// Also -1 for an unknown call or code, or nth < 1.
CUMEM_EMULATOR_API int cumem_emulator_fail(int machine, const char* call, long nth, int code);

// Drops all rules that have not fired.
CUMEM_EMULATOR_API int cumem_emulator_clear(int machine);

// How often the machine got this call, the failed ones too; -1 as above.
CUMEM_EMULATOR_API long cumem_emulator_call_count(int machine, const char* call);

// From now on the device's context is dead: every call that uses the context or
// the device's memory returns `code` (say 700, CUDA_ERROR_ILLEGAL_ADDRESS), and
// work in flight is dropped. What still answers: cuInit, versions and names,
// device queries, and the calls that retain, release, push, pop or ask for a
// context. code 0 revives it. Also -1 for an unknown code.
CUMEM_EMULATOR_API int cumem_emulator_poison(int machine, int ordinal, int code);

// --- what is alive ----------------------------------------------------------

// Physical bytes in use on a device; 0 also where there is no such device.
CUMEM_EMULATOR_API uint64_t cumem_emulator_used_bytes(int machine, int ordinal);

CUMEM_EMULATOR_API int cumem_emulator_ledger(int machine, cumem_emulator_ledger_t* ledger);

// --- streams ----------------------------------------------------------------

// A new stream on a device, to be given to the driver calls; null on failure.
// The device's context is kept active from then on, as a runtime does.
CUMEM_EMULATOR_API void* cumem_emulator_stream_create(int machine, int ordinal, int non_blocking);

// The legacy stream of a device by a handle that means it from any thread.
CUMEM_EMULATOR_API void* cumem_emulator_stream_of(int machine, int ordinal);

// All four return a CUresult. The handle is invalid after destroy; pending work is
// still done.
CUMEM_EMULATOR_API int cumem_emulator_stream_destroy(void* stream);

// Like a kernel that runs `delay_us`, then writes device memory. `src` is read
// before the call returns. As with a kernel, `dst` is looked at when the work
// runs: memory that is not mapped then kills the context (ILLEGAL_ADDRESS).
CUMEM_EMULATOR_API int cumem_emulator_enqueue_write(int machine, void* stream, uint64_t dst,
                                                    const void* src, uint64_t bytes,
                                                    uint64_t delay_us);

// The same, reading. `dst` must stay valid until the work is done.
CUMEM_EMULATOR_API int cumem_emulator_enqueue_read(int machine, void* stream, uint64_t src,
                                                   void* dst, uint64_t bytes, uint64_t delay_us);

// Work that only takes time.
CUMEM_EMULATOR_API int cumem_emulator_enqueue_delay(int machine, void* stream, uint64_t delay_us);

// cuStreamBeginCapture in GLOBAL mode, as torch.cuda.graph does; a CUresult. For
// other modes call cuStreamBeginCapture itself.
CUMEM_EMULATOR_API int cumem_emulator_begin_capture(void* stream);

// Ends the capture from any thread. 0 when it is whole; else the CUresult that
// says why not (901: something invalidated it; 401: nothing was capturing).
CUMEM_EMULATOR_API int cumem_emulator_end_capture(void* stream);

#ifdef __cplusplus
}  // extern "C"
#endif
