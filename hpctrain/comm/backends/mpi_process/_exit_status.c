/* What a rank does when its process exits, by the exit code, which Python does not know before: see exit_status.py. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static pid_t owner; /* handlers are inherited by forked children, which must not act */
static int (*is_initialized)(int *), (*is_finalized)(int *), (*finalize)(void);
static int (*abort_by_pointer)(void *, int), (*abort_by_number)(int, int);
static void *world_pointer;
static int world_number;
static char *open_words, *waiting_words; /* while a session is open */
static int finalizes;    /* whether an exiting process must finalize MPI here */
static int (*is_python_up)(void);
static const int ABORT_MAY_TAKE_S = 3, FINALIZE_MAY_TAKE_S = 5;

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

static void *say_later(void *words)
{
    sleep(FINALIZE_MAY_TAKE_S);
    say(words, 0);
    return NULL;
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
    if (status && !(status & 255))
        status = 1; /* the system keeps 8 bits */
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
    if (finalizes) {
        if (waiting_words)
            pthread_create(&thread, NULL, say_later, waiting_words);
        finalize(); /* waits for the other ranks */
    }
}

/* Called by mpi4py instead of MPI_Finalize. When Python has ended, MPI is not finalized yet, but by `at_exit`. */
static int finalize_later(void)
{
    if (is_python_up() || getpid() != owner)
        return finalize();
    finalizes = 1;
    return 0;
}

/* Has the calls of MPI_Finalize in a loaded library go to `finalize_later`: replaces the address that the dynamic
   linker has put, or will put, into the library's table. Returns the number of places. */
static int redirect_finalize(void *library)
{
    struct link_map *map = NULL;
    const ElfW(Dyn) *entry;
    const ElfW(Sym) *symbols = NULL;
    const ElfW(Rela) *tables[2] = {NULL, NULL};
    const char *names = NULL;
    size_t sizes[2] = {0, 0}, each, page = (size_t)sysconf(_SC_PAGESIZE);
    int table, found = 0;
    if (dlinfo(library, RTLD_DI_LINKMAP, &map) || !map)
        return 0;
    for (entry = map->l_ld; entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == DT_SYMTAB)
            symbols = (const void *)entry->d_un.d_ptr;
        else if (entry->d_tag == DT_STRTAB)
            names = (const void *)entry->d_un.d_ptr;
        else if (entry->d_tag == DT_JMPREL)
            tables[0] = (const void *)entry->d_un.d_ptr;
        else if (entry->d_tag == DT_PLTRELSZ)
            sizes[0] = entry->d_un.d_val;
        else if (entry->d_tag == DT_RELA)
            tables[1] = (const void *)entry->d_un.d_ptr;
        else if (entry->d_tag == DT_RELASZ)
            sizes[1] = entry->d_un.d_val;
        else if (entry->d_tag == DT_PLTREL && entry->d_un.d_val != DT_RELA)
            return 0; /* an architecture with relocations of another form */
    }
    for (table = 0; symbols && names && table < 2; table++)
        for (each = 0; tables[table] && each < sizes[table] / sizeof(ElfW(Rela)); each++) {
            const ElfW(Rela) *place = &tables[table][each];
            void **address = (void **)(map->l_addr + place->r_offset);
            void *start = (void *)((size_t)address & ~(page - 1));
            if (strcmp(names + symbols[ELF64_R_SYM(place->r_info)].st_name, "MPI_Finalize"))
                continue;
            if (mprotect(start, page, PROT_READ | PROT_WRITE))
                continue;
            *address = (void *)finalize_later;
            found++;
        }
    return found;
}

/* For a process whose mpi4py finalizes MPI itself while Python ends: from now on `at_exit` does. Call it after
   `exit_status_started`. path: of the loaded module. is_up: Py_IsInitialized. Returns 0 if that is not possible. */
int exit_status_take_over(const char *path, void *is_up)
{
    void *library = sizeof(void *) == 8 ? dlopen(path, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    is_python_up = is_up;
    finalizes = 0;
    return library ? redirect_finalize(library) : 0;
}

/* From now on an exiting process finalizes MPI. The functions are MPI's, world is the address of a handle. */
void exit_status_started(void *initialized, void *ended, void *end, void *abort_all, const void *world, int is_pointer)
{
    owner = getpid();
    is_initialized = initialized;
    is_finalized = ended;
    finalize = end;
    finalizes = 1;
    if (is_pointer) {
        world_pointer = *(void *const *)world;
        abort_by_pointer = abort_all;
    } else {
        world_number = *(const int *)world;
        abort_by_number = abort_all;
    }
    on_exit(at_exit, NULL);
}

/* While `words` is not NULL, a process that exits with another code than 0 prints them and aborts all ranks; one that
   exits with 0, and waits long for the others, prints `waiting`. */
void exit_status_open(const char *words, const char *waiting)
{
    char *before = open_words, *waiting_before = waiting_words;
    open_words = words ? strdup(words) : NULL;
    waiting_words = waiting ? strdup(waiting) : NULL;
    free(before);
    free(waiting_before);
}
