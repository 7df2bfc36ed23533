/* A timer that ends this process although Python is blocked: a thread of the C library, which needs no lock of Python's.
   See gil_free_timer.py. When it is due, it runs a program, waits for its end, and leaves the process with an exit code.
   The program gets two more words: for how many seconds the timer was not set, and its note. */

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
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
    struct timespec wakes; /* when the thread looks by itself; 0: when it gets a signal */
    struct timespec set; /* when `due` was set last */
    int exit_code;
    char **program; /* ends with room for two words and a null pointer */
    size_t num_words;
    char note[1024];
} gil_free_timer;

/* A thread that wakes up so much later than planned was suspended together with Python, which gets as long again. */
static const double SUSPENDED_AFTER_S = 1.0, CONTINUES_WITHIN_S = 5.0;

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

/* Seconds from a time until now. */
static double seconds_since(const struct timespec *then)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)(now.tv_sec - then->tv_sec) + 1e-9 * (double)(now.tv_nsec - then->tv_nsec);
}

static void set_after(struct timespec *due, double seconds)
{
    clock_gettime(CLOCK_MONOTONIC, due);
    due->tv_sec += (time_t)seconds;
    due->tv_nsec += (long)((seconds - (double)(time_t)seconds) * 1e9);
    if (due->tv_nsec >= 1000000000L) {
        due->tv_sec++;
        due->tv_nsec -= 1000000000L;
    }
}

static int is_before(const struct timespec *first, const struct timespec *second)
{
    return first->tv_sec < second->tv_sec || (first->tv_sec == second->tv_sec && first->tv_nsec < second->tv_nsec);
}

static void *wait_until_due(void *argument)
{
    gil_free_timer *timer = argument;
    double late;
    char seconds[32];
    pthread_mutex_lock(&timer->mutex);
    for (;;) {
        timer->wakes = timer->due;
        if (!timer->due.tv_sec) {
            pthread_cond_wait(&timer->changed, &timer->mutex);
            continue;
        }
        late = seconds_since(&timer->due);
        if (late < 0)
            pthread_cond_timedwait(&timer->changed, &timer->mutex, &timer->due);
        else if (late > SUSPENDED_AFTER_S)
            set_after(&timer->due, CONTINUES_WITHIN_S);
        else
            break;
    }
    snprintf(seconds, sizeof seconds, "%.1f", seconds_since(&timer->set));
    timer->program[timer->num_words] = seconds;
    timer->program[timer->num_words + 1] = timer->note;
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
    if (!timer || !(timer->program = calloc(count + 3, sizeof *timer->program)))
        return NULL;
    for (each = 0; each < count; each++)
        if (!(timer->program[each] = strdup(program[each])))
            return NULL;
    timer->num_words = count;
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

/* The program runs in `seconds` from now, unless this is called again before; with 0 it does not run. note: for the
   program; cut off where it is too long. */
void gil_free_timer_set(gil_free_timer *timer, double seconds, const char *note)
{
    struct timespec due = {0, 0};
    if (seconds > 0)
        set_after(&due, seconds);
    pthread_mutex_lock(&timer->mutex);
    timer->due = due;
    clock_gettime(CLOCK_MONOTONIC, &timer->set);
    strncpy(timer->note, note, sizeof timer->note - 1);
    /* A thread that wakes up earlier anyway looks then: a rank sets its timer many times per second. */
    if (due.tv_sec && (!timer->wakes.tv_sec || is_before(&due, &timer->wakes)))
        pthread_cond_signal(&timer->changed);
    pthread_mutex_unlock(&timer->mutex);
}
