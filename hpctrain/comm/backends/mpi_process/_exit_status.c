/* What a rank does when its process exits, by the exit code, which Python does not know before: see exit_status.py. */

#define _DEFAULT_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static pid_t owner; /* handlers are inherited by forked children, which must not act */
static int (*is_initialized)(int *), (*is_finalized)(int *), (*finalize)(void);
static int (*abort_by_pointer)(void *, int), (*abort_by_number)(int, int);
static void *world_pointer;
static int world_number;
static char *open_words; /* while a session is open */
static const int ABORT_MAY_TAKE_S = 3;

static void say(const char *words, int status)
{
    char line[2048];
    int length = snprintf(line, sizeof line, words, status);
    if (length > (int)sizeof line - 1)
        length = sizeof line - 1;
    if (length > 0 && write(STDERR_FILENO, line, (size_t)length) < 0)
        return;
}

static void *leave_later(void *code)
{
    sleep(ABORT_MAY_TAKE_S);
    _exit((int)(long)code);
}

static void at_exit(int status, void *nothing)
{
    int initialized = 0, finalized = 1;
    pthread_t thread;
    (void)nothing;
    if (getpid() != owner)
        return;
    is_initialized(&initialized);
    is_finalized(&finalized);
    if (!initialized || finalized)
        return;
    if (status && open_words) {
        say(open_words, status);
        /* Without network MPI_Abort does not return. */
        pthread_create(&thread, NULL, leave_later, (void *)(long)status);
        if (abort_by_pointer)
            abort_by_pointer(world_pointer, status);
        else
            abort_by_number(world_number, status);
        _exit(status);
    }
    finalize();
}

/* From now on an exiting process finalizes MPI. The functions are MPI's, world is the address of a handle. */
void exit_status_started(void *initialized, void *ended, void *end, void *abort_all, const void *world, int is_pointer)
{
    owner = getpid();
    is_initialized = initialized;
    is_finalized = ended;
    finalize = end;
    if (is_pointer) {
        world_pointer = *(void *const *)world;
        abort_by_pointer = abort_all;
    } else {
        world_number = *(const int *)world;
        abort_by_number = abort_all;
    }
    on_exit(at_exit, NULL);
}

/* While `words` is not NULL, a process that exits with another code than 0 prints them and aborts all ranks. */
void exit_status_open(const char *words)
{
    char *before = open_words;
    open_words = words ? strdup(words) : NULL;
    free(before);
}
