/* sched_yield for ranks that outnumber the cores: a short sleep instead.

Open MPI, told to yield while it waits, calls sched_yield without end. Since Linux 6.18 a task that yields
gives up its place in the order of virtual time; with dozens of yielding threads on two cores the tasks that
sleep and wake were then left waiting for up to 43 s (measured; docs/log.md), and reductions with them.
*/
#include <time.h>

int sched_yield(void) {
    struct timespec moment = {0, 20000};
    nanosleep(&moment, 0);
    return 0;
}
