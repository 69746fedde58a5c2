/* A libOpenCL.so.1 with two platforms for tests: one with two devices, and one whose devices cannot be asked. */
#include <stddef.h>
#include <stdio.h>

int clGetPlatformIDs(unsigned int most, void **platforms, unsigned int *count) {
    for (unsigned int i = 0; i < 2 && i < most; i++) platforms[i] = (void *)(size_t)(i + 1);
    *count = 2;
    return 0;
}
int clGetDeviceIDs(void *platform, unsigned long kind, unsigned int most, void **devices, unsigned int *count) {
    if (platform != (void *)1 || kind != 0xFFFFFFFF) return -1;
    for (unsigned int i = 0; i < 2 && i < most; i++) devices[i] = (void *)(size_t)(i + 7);
    *count = 2;
    return 0;
}
int clGetPlatformInfo(void *platform, unsigned int which, size_t bytes, char *text, size_t *used) {
    return which == 0x0902 ? (snprintf(text, bytes, "Platform %zu", (size_t)platform), 0) : -30;
}
int clGetDeviceInfo(void *device, unsigned int which, size_t bytes, char *text, size_t *used) {
    return which == 0x102B && device != (void *)8 ? (snprintf(text, bytes, "Device %zu ", (size_t)device), 0) : -30;
}
