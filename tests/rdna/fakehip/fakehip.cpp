// A HIP runtime without a GPU: memory is the host's, streams have finished when a call returns, and every kernel launch is
// handed to one function, which records or executes it. One device for each architecture named in FAKEHIP_ARCHS.
//
// Only what ggml-hip calls is here. What is not needed for that (hipBLAS, peer copies of other kinds) ends the process with
// its name: nothing pretends to have worked.
#include <hip/hip_runtime_api.h>
#include <hipblas/hipblas.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

// what a launch is, for the function that takes it; launch.py has the same declaration
struct fakehip_launch {
    int32_t device;
    int32_t captured;       // 1: into a graph; keep the arguments and return a number for it. 2: that number is in `token`
    int64_t token;
    const char * kernel;    // the mangled name
    const void * code;      // the ELF file of this architecture, null where the library has none
    uint64_t code_size;
    uint32_t grid[3];       // in blocks
    uint32_t block[3];
    uint64_t shared;        // bytes of dynamic LDS
    void ** args;           // one pointer an argument; null when captured is 2
};

struct fakehip_range {
    uint64_t address;
    uint64_t size;
};

namespace {

struct kernel {
    const struct module * owner;
    std::string name;
};

struct module {
    const char * bundle;
};

struct node {
    enum { LAUNCH, COPY, SET } kind;
    fakehip_launch launch;
    void * to;
    const void * from;
    int value;
    size_t size;
};

struct device {
    std::string arch;
    int n_multiprocessor; // as HIP counts on RDNA: pairs of compute units
    bool integrated;
};

std::map<uint64_t, uint64_t> ranges;
uint64_t generation = 0;
std::map<const void *, kernel> kernels;
int64_t (*on_launch)(const fakehip_launch *) = nullptr;
std::vector<node> * capture = nullptr;
thread_local int current = 0;
thread_local struct { dim3 grid, block; size_t shared; hipStream_t stream; } configuration;

[[noreturn]] void fail(const char * what, const char * why) {
    fprintf(stderr, "fakehip: %s: %s\n", what, why);
    abort();
}

const std::vector<device> & devices() {
    static const std::vector<device> found = [] {
        const char * archs = getenv("FAKEHIP_ARCHS");
        std::string rest = archs ? archs : "gfx1151,gfx1201";
        std::vector<device> all;
        while (!rest.empty()) {
            const std::string arch = rest.substr(0, rest.find(','));
            rest = arch.size() == rest.size() ? "" : rest.substr(arch.size() + 1);
            if (arch != "gfx1151" && arch != "gfx1201") {
                fail(arch.c_str(), "expected gfx1151 or gfx1201 in FAKEHIP_ARCHS");
            }
            all.push_back(arch == "gfx1151" ? device{arch, 20, true} : device{arch, 32, false});
        }
        return all;
    }();
    return found;
}

hipError_t allocate(void ** to, size_t size) {
    void * memory = nullptr;
    if (posix_memalign(&memory, 4096, size ? size : 1) != 0) {
        return hipErrorOutOfMemory;
    }
    memset(memory, 0xff, size); // NaN: what was never written shows in a result
    ranges[(uint64_t) memory] = size;
    generation++;
    *to = memory;
    return hipSuccess;
}

hipError_t release(void * memory) {
    if (memory && !ranges.erase((uint64_t) memory)) {
        fail("hipFree", "an address that was not allocated");
    }
    generation++;
    free(memory);
    return hipSuccess;
}

// the code object of an architecture in a bundle of clang's
const void * find_code(const char * bundle, const std::string & arch, uint64_t & size) {
    static const char magic[] = "__CLANG_OFFLOAD_BUNDLE__";
    if (memcmp(bundle, magic, sizeof(magic) - 1) != 0) {
        fail("__hipRegisterFatBinary", "expected an uncompressed offload bundle");
    }
    const char * at = bundle + sizeof(magic) - 1;
    auto next = [&] { uint64_t value; memcpy(&value, at, 8); at += 8; return value; };
    for (uint64_t n = next(); n > 0; n--) {
        const uint64_t offset = next(), bytes = next(), length = next();
        const std::string id(at, length);
        at += length;
        if (bytes > 0 && id.size() >= arch.size() && id.compare(id.size() - arch.size(), arch.size(), arch) == 0) {
            size = bytes;
            return bundle + offset;
        }
    }
    size = 0;
    return nullptr;
}

hipError_t launch(const void * function, dim3 grid, dim3 block, void ** args, size_t shared) {
    const auto found = kernels.find(function);
    if (found == kernels.end()) {
        return hipErrorInvalidDeviceFunction;
    }
    if (!on_launch) {
        fail(found->second.name.c_str(), "launched before fakehip_on_launch said who takes it");
    }
    fakehip_launch l = {};
    l.device = current;
    l.kernel = found->second.name.c_str();
    l.code   = find_code(found->second.owner->bundle, devices()[current].arch, l.code_size);
    l.grid[0] = grid.x, l.grid[1] = grid.y, l.grid[2] = grid.z;
    l.block[0] = block.x, l.block[1] = block.y, l.block[2] = block.z;
    l.shared = shared;
    l.args = args;
    if (!l.code) {
        return hipErrorNoBinaryForGpu;
    }
    if ((uint64_t) block.x*block.y*block.z > 1024 || shared > 65536 || grid.x == 0 || grid.y == 0 || grid.z == 0 ||
            block.x == 0 || block.y == 0 || block.z == 0) {
        return hipErrorInvalidConfiguration;
    }
    if (capture) {
        l.captured = 1;
        l.token = on_launch(&l);
        l.captured = 2;
        l.args = nullptr;
        capture->push_back({node::LAUNCH, l, nullptr, nullptr, 0, 0});
        return hipSuccess;
    }
    return on_launch(&l) < 0 ? hipErrorLaunchFailure : hipSuccess;
}

hipError_t copy(void * to, const void * from, size_t size) {
    if (capture) {
        capture->push_back({node::COPY, {}, to, from, 0, size});
    } else {
        memmove(to, from, size);
    }
    return hipSuccess;
}

hipError_t set(void * to, int value, size_t size) {
    if (capture) {
        capture->push_back({node::SET, {}, to, nullptr, value, size});
    } else {
        memset(to, value, size);
    }
    return hipSuccess;
}

std::vector<node> * nodes(void * graph) {
    return (std::vector<node> *) graph;
}

} // namespace

// for the test's side

EXPORT void fakehip_on_launch(int64_t (*take)(const fakehip_launch *)) { on_launch = take; }

EXPORT uint64_t fakehip_generation(void) { return generation; }

EXPORT uint64_t fakehip_ranges(fakehip_range * to, uint64_t max) {
    uint64_t n = 0;
    for (const auto & range : ranges) {
        if (n < max) {
            to[n] = {range.first, range.second};
        }
        n++;
    }
    return n;
}

// what clang's generated code calls

EXPORT void ** __hipRegisterFatBinary(const void * wrapper) {
    struct { uint32_t magic, version; const char * bundle; void * unused; } w;
    memcpy(&w, wrapper, sizeof(w));
    if (w.magic != 0x48495046) {
        fail("__hipRegisterFatBinary", "expected the magic number of HIP");
    }
    return (void **) new module{w.bundle};
}

EXPORT void __hipRegisterFunction(void ** handle, const void * function, char *, const char * name, unsigned, void *, void *, dim3 *, dim3 *, int *) {
    kernels[function] = {(const module *) handle, name};
}

EXPORT void __hipUnregisterFatBinary(void **) {}

EXPORT void __hipRegisterVar(void **, void *, char *, char * name, int, size_t, int, int) {
    fail(name, "variables that host and device share are not covered");
}

EXPORT hipError_t __hipPushCallConfiguration(dim3 grid, dim3 block, size_t shared, hipStream_t stream) {
    configuration = {grid, block, shared, stream};
    return hipSuccess;
}

EXPORT hipError_t __hipPopCallConfiguration(dim3 * grid, dim3 * block, size_t * shared, hipStream_t * stream) {
    *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared, *stream = configuration.stream;
    return hipSuccess;
}

EXPORT hipError_t hipLaunchKernel(const void * function, dim3 grid, dim3 block, void ** args, size_t shared, hipStream_t) {
    return launch(function, grid, block, args, shared);
}

EXPORT hipError_t hipLaunchCooperativeKernel(const void *, dim3, dim3, void **, unsigned, hipStream_t) {
    fail("hipLaunchCooperativeKernel", "not covered");
}

// devices

EXPORT hipError_t hipGetDeviceCount(int * n) { *n = (int) devices().size(); return hipSuccess; }
EXPORT hipError_t hipGetDevice(int * id) { *id = current; return hipSuccess; }

EXPORT hipError_t hipSetDevice(int id) {
    if (id < 0 || id >= (int) devices().size()) {
        return hipErrorInvalidDevice;
    }
    current = id;
    return hipSuccess;
}

EXPORT hipError_t hipGetDeviceProperties(hipDeviceProp_t * p, int id) {
    const device & d = devices().at(id);
    memset(p, 0, sizeof(*p));
    snprintf(p->name, sizeof(p->name), "interpreter of %s", d.arch.c_str());
    snprintf(p->gcnArchName, sizeof(p->gcnArchName), "%s", d.arch.c_str());
    p->totalGlobalMem = (size_t) 8 << 30;
    p->sharedMemPerBlock = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->multiProcessorCount = d.n_multiprocessor;
    p->integrated = d.integrated;
    p->major = atoi(d.arch.substr(3, 2).c_str());
    p->minor = d.arch[5] - '0';
    return hipSuccess;
}

EXPORT hipError_t hipDeviceGetAttribute(int * value, hipDeviceAttribute_t attribute, int) {
    if (attribute != hipDeviceAttributeCooperativeLaunch) {
        return hipErrorInvalidValue;
    }
    *value = 0;
    return hipSuccess;
}

EXPORT hipError_t hipDeviceGetPCIBusId(char * to, int length, int id) {
    snprintf(to, length, "0000:%02x:00.0", id);
    return hipSuccess;
}

EXPORT hipError_t hipMemGetInfo(size_t * free_, size_t * total) { *free_ = *total = (size_t) 8 << 30; return hipSuccess; }
EXPORT hipError_t hipDeviceCanAccessPeer(int * can, int, int) { *can = 0; return hipSuccess; }
EXPORT hipError_t hipDeviceEnablePeerAccess(int, unsigned) { return hipErrorInvalidDevice; }
EXPORT hipError_t hipDeviceDisablePeerAccess(int) { return hipErrorInvalidDevice; }
EXPORT hipError_t hipDeviceSynchronize(void) { return hipSuccess; }
EXPORT hipError_t hipFuncSetAttribute(const void *, hipFuncAttribute, int) { return hipSuccess; }
EXPORT hipError_t hipGetLastError(void) { return hipSuccess; }
EXPORT hipError_t hipPeekAtLastError(void) { return hipSuccess; }

EXPORT const char * hipGetErrorString(hipError_t error) {
    switch (error) {
        case hipSuccess:                    return "no error";
        case hipErrorNoBinaryForGpu:        return "no code for this architecture";
        case hipErrorInvalidConfiguration:  return "a grid, block or LDS size that the device does not take";
        case hipErrorLaunchFailure:         return "the launch failed";
        case hipErrorInvalidDeviceFunction: return "a function that is no registered kernel";
        default:                            return "an error of the fake runtime";
    }
}

// memory

EXPORT hipError_t hipMalloc(void ** to, size_t size) { return allocate(to, size); }
EXPORT hipError_t hipFree(void * memory) { return release(memory); }
EXPORT hipError_t hipHostMalloc(void ** to, size_t size, unsigned) { return allocate(to, size); }
EXPORT hipError_t hipHostFree(void * memory) { return release(memory); }
EXPORT hipError_t hipMallocManaged(void ** to, size_t size, unsigned) { return allocate(to, size); }
EXPORT hipError_t hipMemAdvise(const void *, size_t, hipMemoryAdvise, int) { return hipSuccess; }
EXPORT hipError_t hipHostRegister(void *, size_t, unsigned) { return hipErrorInvalidValue; }
EXPORT hipError_t hipHostUnregister(void *) { return hipErrorInvalidValue; }
EXPORT hipError_t hipHostGetDevicePointer(void ** to, void * memory, unsigned) { *to = memory; return hipSuccess; }
EXPORT hipError_t hipMemset(void * to, int value, size_t size) { return set(to, value, size); }
EXPORT hipError_t hipMemsetAsync(void * to, int value, size_t size, hipStream_t) { return set(to, value, size); }
EXPORT hipError_t hipMemcpy(void * to, const void * from, size_t size, hipMemcpyKind) { return copy(to, from, size); }
EXPORT hipError_t hipMemcpyAsync(void * to, const void * from, size_t size, hipMemcpyKind, hipStream_t) { return copy(to, from, size); }
EXPORT hipError_t hipMemcpyPeerAsync(void * to, int, const void * from, int, size_t size, hipStream_t) { return copy(to, from, size); }

EXPORT hipError_t hipMemcpy2DAsync(void * to, size_t to_pitch, const void * from, size_t pitch, size_t width, size_t height, hipMemcpyKind, hipStream_t) {
    for (size_t i = 0; i < height; i++) {
        (void) copy((char *) to + i*to_pitch, (const char *) from + i*pitch, width);
    }
    return hipSuccess;
}

// streams, events and graphs: a handle is any address that is not null

EXPORT hipError_t hipStreamCreateWithFlags(hipStream_t * stream, unsigned) { *stream = (hipStream_t) malloc(1); return hipSuccess; }
EXPORT hipError_t hipStreamDestroy(hipStream_t stream) { free((void *) stream); return hipSuccess; }
EXPORT hipError_t hipStreamSynchronize(hipStream_t) { return capture ? hipErrorStreamCaptureUnsupported : hipSuccess; }
EXPORT hipError_t hipStreamWaitEvent(hipStream_t, hipEvent_t, unsigned) { return hipSuccess; }
EXPORT hipError_t hipEventCreateWithFlags(hipEvent_t * event, unsigned) { *event = (hipEvent_t) malloc(1); return hipSuccess; }
EXPORT hipError_t hipEventDestroy(hipEvent_t event) { free((void *) event); return hipSuccess; }
EXPORT hipError_t hipEventRecord(hipEvent_t, hipStream_t) { return hipSuccess; }
EXPORT hipError_t hipEventSynchronize(hipEvent_t) { return hipSuccess; }

EXPORT hipError_t hipStreamBeginCapture(hipStream_t, hipStreamCaptureMode) {
    capture = new std::vector<node>();
    return hipSuccess;
}

EXPORT hipError_t hipStreamEndCapture(hipStream_t, hipGraph_t * graph) {
    *graph = (hipGraph_t) capture;
    capture = nullptr;
    return hipSuccess;
}

EXPORT hipError_t hipGraphInstantiate(hipGraphExec_t * to, hipGraph_t graph, hipGraphNode_t *, char *, size_t) {
    *to = (hipGraphExec_t) new std::vector<node>(*nodes(graph));
    return hipSuccess;
}

EXPORT hipError_t hipGraphExecUpdate(hipGraphExec_t to, hipGraph_t graph, hipGraphNode_t *, hipGraphExecUpdateResult *) {
    *nodes(to) = *nodes(graph);
    return hipSuccess;
}

EXPORT hipError_t hipGraphDestroy(hipGraph_t graph) { delete nodes(graph); return hipSuccess; }
EXPORT hipError_t hipGraphExecDestroy(hipGraphExec_t graph) { delete nodes(graph); return hipSuccess; }

EXPORT hipError_t hipGraphLaunch(hipGraphExec_t graph, hipStream_t) {
    for (const node & n : *nodes(graph)) {
        if (n.kind == node::COPY) {
            (void) copy(n.to, n.from, n.size);
        } else if (n.kind == node::SET) {
            (void) set(n.to, n.value, n.size);
        } else if (on_launch(&n.launch) < 0) {
            return hipErrorLaunchFailure;
        }
    }
    return hipSuccess;
}

// hipBLAS: a handle may be made, a product may not

EXPORT hipblasStatus_t hipblasCreate(hipblasHandle_t * handle) { *handle = (hipblasHandle_t) malloc(1); return HIPBLAS_STATUS_SUCCESS; }
EXPORT hipblasStatus_t hipblasDestroy(hipblasHandle_t handle) { free((void *) handle); return HIPBLAS_STATUS_SUCCESS; }
EXPORT hipblasStatus_t hipblasSetStream(hipblasHandle_t, hipStream_t) { return HIPBLAS_STATUS_SUCCESS; }
