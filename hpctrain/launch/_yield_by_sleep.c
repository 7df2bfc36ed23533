/* sched_yield for ranks that outnumber the cores: a short sleep instead. Preloaded (LD_PRELOAD), see yielding.py.

Open MPI, asked to yield while it waits, calls sched_yield without end. Since Linux 6.18 a task that yields gives up its
place in the order of virtual time. With dozens of yielding threads on two cores, tasks that sleep and wake up were then
left waiting for up to 43 s (measured; docs/log.md). A task that sleeps keeps its place.
*/
#include <time.h>

int sched_yield(void)
{
    struct timespec moment = {0, 20000};
    nanosleep(&moment, 0);
    return 0;
}
