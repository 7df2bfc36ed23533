/* Reads the numbers of the signals that Python's handlers write, and ends this process at a second request to stop,
   also while Python is blocked: a thread of the C library, which needs no lock of Python's. See second_signal.py. */

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

/* As `_State` in second_signal.py, which keeps it as long as the process lives. */
typedef struct {
    int reader, writer;           /* pipes: from the handlers, to Python's thread */
    volatile int leave_code;      /* -1: 128 + the signal's number */
    volatile int answered;        /* Python's thread ends this process itself */
    uint64_t handled;             /* bit n: signal n asks for a stop */
    double same_request_s;        /* a signal so much later is a second request */
    double answers_within_s;      /* Python's thread does, if it can run */
    double leaves_within_s;       /* the process has ended so long after the request */
    const char *who;
} second_signal;

static const int SECOND = 128; /* added to the number of a signal that is a second request */

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void sleep_s(double seconds)
{
    struct timespec left;
    left.tv_sec = (time_t)seconds;
    left.tv_nsec = (long)((seconds - (double)left.tv_sec) * 1e9);
    while (nanosleep(&left, &left) < 0 && errno == EINTR)
        ;
}

static void leave(second_signal *state, int number)
{
    char line[512];
    int code, length;
    sleep_s(state->answers_within_s);
    code = state->leave_code < 0 ? 128 + number : state->leave_code;
    if (state->answered) {
        sleep_s(state->leaves_within_s - state->answers_within_s);
        _exit(code);
    }
    length = snprintf(line, sizeof line,
                      "hpctrain: %s: a second stop signal (%d), and C code holds Python's lock: ending at once, nothing "
                      "more is saved (exit code %d)\n", state->who, number, code);
    if (length > 0 && write(STDERR_FILENO, line, (size_t)length < sizeof line ? (size_t)length : sizeof line - 1) < 0)
        _exit(code);
    _exit(code);
}

static void *read_signals(void *argument)
{
    second_signal *state = argument;
    unsigned char number, passed;
    double first_s = 0;
    int interrupts = 0, is_second;
    ssize_t got;
    for (;;) {
        got = read(state->reader, &number, 1);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        is_second = 0;
        if (number < 64 && state->handled >> number & 1) {
            interrupts += number == SIGINT;
            if (first_s == 0)
                first_s = now_s();
            else
                is_second = now_s() - first_s >= state->same_request_s || (number == SIGINT && interrupts > 1);
        }
        passed = (unsigned char)(number | (is_second ? SECOND : 0));
        if (write(state->writer, &passed, 1) < 0)
            break;
        if (is_second)
            leave(state, number);
    }
    close(state->reader);
    close(state->writer); /* ends Python's thread */
    return NULL;
}

/* Starts the thread, which ends when the other end of `reader` is closed. Returns 0, or what pthread_create does. */
int second_signal_start(second_signal *state)
{
    sigset_t all, before;
    pthread_t thread;
    int failed;
    sigfillset(&all); /* signals are for the threads of Python */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    failed = pthread_create(&thread, NULL, read_signals, state);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!failed)
        pthread_detach(thread);
    return failed;
}
