/* A libnvidia-ml.so.1 with two GPUs for tests; the environment says what fails.
   FAIL: a comma after each function that returns NVML_ERROR_NOT_SUPPORTED. LOST_AFTER: calls of GetCount that succeed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int pid; unsigned long long used; unsigned int instance, compute; } Process;
typedef struct { unsigned int gpu, memory; } Use;

static int counts, inits;

static int fails(const char *name) {
    char text[100];
    const char *list = getenv("FAIL");
    snprintf(text, sizeof text, "%s,", name);
    return list && strstr(list, text) ? 3 : 0;
}

int nvmlInitWithFlags(unsigned int flags) { inits++; counts = 0; return fails("init") ? 9 : 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) {
    const char *after = getenv("LOST_AFTER");
    *count = 2;
    return after && inits == 1 && counts++ >= atoi(after) ? 15 : fails("count");
}
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
    *device = (void *)(size_t)(index + 1);
    return index == 1 ? fails("second") : 0;
}
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned int length) {
    snprintf(uuid, length, fails("text") ? "\xff\xfe" : "GPU-%zu", (size_t)device);
    return fails("uuid");
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = (void *)(size_t)(uuid[4] - '0');
    return strncmp(uuid, "GPU-", 4) ? 2 : 0;
}
int nvmlDeviceGetName(void *device, char *name, unsigned int length) {
    snprintf(name, length, "Test GPU %zu", (size_t)device);
    return fails("name");
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    *major = 9, *minor = 0;
    return fails("capability");
}
int nvmlSystemGetDriverVersion(char *version, unsigned int length) { snprintf(version, length, "580.1"); return 0; }
int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
    static unsigned long long calls;
    const char *growth = getenv("GROWTH");
    memory->used = (1ULL << 33) + (growth ? calls++ * strtoull(growth, NULL, 10) : 0);
    memory->total = 85899345920ULL, memory->free = memory->total - memory->used;
    return fails("memory");
}
/* PROCESSES: "pid" or "pid:bytes" of the one process on each GPU. */
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *count, Process *processes) {
    const char *text = getenv("PROCESSES"), *bytes = text ? strchr(text, ':') : NULL;
    unsigned int room = *count;
    *count = text ? 1 : 0;
    if (fails("processes")) return 3;
    if (room < *count) return 7;
    if (text) {
        processes->pid = strncmp(text, "self", 4) ? atoi(text) : getpid();
        processes->used = bytes ? strtoull(bytes + 1, NULL, 10) : ~0ULL;
    }
    return 0;
}
int nvmlDeviceGetUtilizationRates(void *device, Use *use) { use->gpu = 50; return fails("use"); }
int nvmlDeviceGetPowerUsage(void *device, unsigned int *milliwatts) { *milliwatts = 70500; return fails("power"); }
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned int *milliwatts) { *milliwatts = 700000; return fails("limit"); }
#ifndef OLD
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *mj) { *mj = 1ULL << 40; return fails("energy"); }
#endif
