// pyluce: SIGBUS in mapped files; ggml-luce-guard.h says what happens.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE 1 // MAP_ANONYMOUS, SA_ONSTACK
#endif

#include "ggml-luce-guard.h"

#if defined(_WIN32)

bool ggml_luce_guard_add(const void * base, size_t size) {
    (void) base;
    (void) size;
    return false;
}

void ggml_luce_guard_remove(const void * base) {
    (void) base;
}

int ggml_luce_guard_faults(const void * base) {
    (void) base;
    return 0;
}

#else

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_RANGES 1024

// An entry is free while its size is 0. The handler reads it without a lock: begin is written before size, and size cleared before begin.
struct range {
    atomic_uintptr_t begin;
    atomic_size_t    size;
    atomic_int       faults;
};

static struct range     ranges[MAX_RANGES];
static atomic_int       all_faults;
static uintptr_t        page_size;
static struct sigaction before;
static pthread_mutex_t  lock = PTHREAD_MUTEX_INITIALIZER;

// without a lock or an allocation, as a handler needs it
#if defined(__GNUC__)
static _Thread_local __attribute__((tls_model("initial-exec"))) int passing = 0;
#else
static _Thread_local int passing = 0;
#endif

// `before` may call this handler again, when it was installed after it and this one then once more
static void pass_on(int signal, siginfo_t * info, void * context) {
    const bool again = passing > 0;
    passing++;
    if (!again && (before.sa_flags & SA_SIGINFO)) {
        before.sa_sigaction(signal, info, context);
    } else if (again || before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN) {
        struct sigaction end = { 0 };
        end.sa_handler = SIG_DFL;
        sigaction(signal, &end, NULL); // the access is tried again, and ends the process
    } else {
        before.sa_handler(signal);
    }
    passing--;
}

static void on_bus_error(int signal, siginfo_t * info, void * context) {
    const int       kept_errno = errno;
    const uintptr_t at = (uintptr_t) info->si_addr;
    for (int i = 0; i < MAX_RANGES; i++) {
        const size_t    size  = atomic_load(&ranges[i].size);
        const uintptr_t begin = atomic_load(&ranges[i].begin);
        if (size == 0 || at < begin || at - begin >= size) {
            continue;
        }
        const uintptr_t page = at / page_size * page_size;
        const int       how  = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
        if (mmap((void *) page, begin + size - page, PROT_READ, how, -1, 0) == MAP_FAILED) {
            break;
        }
        atomic_fetch_add(&ranges[i].faults, 1);
        atomic_fetch_add(&all_faults, 1);
        errno = kept_errno;
        return;
    }
    pass_on(signal, info, context);
    errno = kept_errno;
}

static bool is_ours(const struct sigaction * action) {
    return (action->sa_flags & SA_SIGINFO) && action->sa_sigaction == on_bus_error;
}

// the handler stays for good: who came after it may call it
static bool install(void) {
    struct sigaction now;
    if (page_size == 0) {
        page_size = (uintptr_t) sysconf(_SC_PAGESIZE);
    }
    if (sigaction(SIGBUS, NULL, &now) != 0) {
        return false;
    }
    if (is_ours(&now)) {
        return true;
    }
    struct sigaction ours = { 0 };
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags     = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    before = now;
    return sigaction(SIGBUS, &ours, NULL) == 0;
}

bool ggml_luce_guard_add(const void * base, size_t size) {
    bool done = false;
    pthread_mutex_lock(&lock);
    if (size > 0 && install()) {
        for (int i = 0; i < MAX_RANGES && !done; i++) {
            if (atomic_load(&ranges[i].size) == 0) {
                atomic_store(&ranges[i].faults, 0);
                atomic_store(&ranges[i].begin, (uintptr_t) base);
                atomic_store(&ranges[i].size, size);
                done = true;
            }
        }
    }
    pthread_mutex_unlock(&lock);
    return done;
}

void ggml_luce_guard_remove(const void * base) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_RANGES; i++) {
        if (atomic_load(&ranges[i].size) > 0 && atomic_load(&ranges[i].begin) == (uintptr_t) base) {
            atomic_store(&ranges[i].size, 0);
            break;
        }
    }
    pthread_mutex_unlock(&lock);
}

int ggml_luce_guard_faults(const void * base) {
    if (base == NULL) {
        return atomic_load(&all_faults);
    }
    int found = 0;
    for (int i = 0; i < MAX_RANGES; i++) {
        if (atomic_load(&ranges[i].size) > 0 && atomic_load(&ranges[i].begin) == (uintptr_t) base) {
            found = atomic_load(&ranges[i].faults);
        }
    }
    return found;
}

#endif // _WIN32
