/* A timer that ends this process although Python is blocked: a thread of the C library, which needs no lock of Python's.
   See gil_free_timer.py. When it is due, it runs a program, waits for its end, and leaves the process with an exit code. */

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

typedef struct {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    struct timespec due; /* of CLOCK_MONOTONIC; 0: never */
    int exit_code;
    char **program; /* ends with a null pointer */
} gil_free_timer;

static void run_program(char **program)
{
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    sigset_t none;
    pid_t child;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
    sigemptyset(&none); /* this thread blocks all signals, the program must not */
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
    if (posix_spawn(&child, program[0], &actions, &attributes, program, environ) == 0)
        while (waitpid(child, NULL, 0) < 0 && errno == EINTR)
            ;
}

static int is_over(const struct timespec *due)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec > due->tv_sec || (now.tv_sec == due->tv_sec && now.tv_nsec >= due->tv_nsec);
}

static void *wait_until_due(void *argument)
{
    gil_free_timer *timer = argument;
    pthread_mutex_lock(&timer->mutex);
    for (;;) {
        if (!timer->due.tv_sec)
            pthread_cond_wait(&timer->changed, &timer->mutex);
        else if (!is_over(&timer->due))
            pthread_cond_timedwait(&timer->changed, &timer->mutex, &timer->due);
        else
            break;
    }
    pthread_mutex_unlock(&timer->mutex);
    run_program(timer->program);
    _exit(timer->exit_code);
}

/* Returns a new timer that is not set, NULL without memory or threads. It lives as long as the process. */
gil_free_timer *gil_free_timer_new(const char *const *program, int exit_code)
{
    gil_free_timer *timer = calloc(1, sizeof *timer);
    pthread_condattr_t monotonic;
    pthread_t thread;
    sigset_t all, before;
    size_t count = 0, each;
    int failed;
    while (program[count])
        count++;
    if (!timer || !(timer->program = calloc(count + 1, sizeof *timer->program)))
        return NULL;
    for (each = 0; each < count; each++)
        if (!(timer->program[each] = strdup(program[each])))
            return NULL;
    timer->exit_code = exit_code;
    pthread_mutex_init(&timer->mutex, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&timer->changed, &monotonic);
    sigfillset(&all); /* signals are for the threads of Python */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    failed = pthread_create(&thread, NULL, wait_until_due, timer);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed)
        return NULL;
    pthread_detach(thread);
    return timer;
}

/* The program runs in `seconds` from now, unless it is set again before; with 0 it does not run. */
void gil_free_timer_set(gil_free_timer *timer, double seconds)
{
    struct timespec due = {0, 0};
    if (seconds > 0) {
        clock_gettime(CLOCK_MONOTONIC, &due);
        due.tv_sec += (time_t)seconds;
        due.tv_nsec += (long)((seconds - (double)(time_t)seconds) * 1e9);
        if (due.tv_nsec >= 1000000000L) {
            due.tv_sec++;
            due.tv_nsec -= 1000000000L;
        }
    }
    pthread_mutex_lock(&timer->mutex);
    timer->due = due;
    pthread_cond_signal(&timer->changed);
    pthread_mutex_unlock(&timer->mutex);
}
