/* What mpirun and srun start in place of a rank: `fork-client SERVER... -- COMMAND...`. See docs/adr/0071.

It connects to the fork server of this node, which it starts (SERVER) if there is none, and hands over its open files.
The server forks, and the child becomes the rank that COMMAND would have become. This process then stands for that rank:
it hands signals on, and ends as the rank ends. If the server cannot do it, COMMAND is executed here.

Between the processes:
  client -> server   one message: which signals were blocked (64 bits), number of descriptors, their numbers (32 bits
                     each); with it the read end of a pipe whose write end only this process has (the kernel kills the
                     rank when it is closed), and the descriptors.
  server -> client   's', process number, and a pidfd: the rank has been forked; or 'r' and a text: refused.
                     'e' and a wait status: the rank has ended.
Everything else the server reads from /proc. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define KEY "HPCTRAIN_FORK_SERVER"
#define WAIT "HPCTRAIN_FORK_SERVER_WAIT_S"
/* A variable of the server's that makes the memory larger in which the kernel shows a rank's variables to others. */
#define ROOM "HPCTRAIN_FORK_SERVER_ROOM"
#define MOST_DESCRIPTORS 64
#define MOST_TEXT 1024
#define LISTENS_AT 3

static char **command;
static sigset_t mask_before;
static char spaces[16384];

/* Becomes the rank itself. reason: NULL, or why, which is printed. */
static void start_here(const char *reason)
{
    if (reason != NULL && *reason != '\0') {
        fprintf(stderr, "hpctrain launch: this rank starts by itself: %s\n", reason);
        fflush(stderr);
    }
    sigprocmask(SIG_SETMASK, &mask_before, NULL);
    execvp(command[0], command);
    fprintf(stderr, "hpctrain launch: %s cannot be started: %s\n", command[0], strerror(errno));
    _exit(errno == ENOENT ? 127 : 126);
}

static double now_s(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* The descriptors that a new program would have, but 0 to 2. Returns how many, -1 if there are too many. */
static int open_descriptors(int *found)
{
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    struct dirent *entry;
    if (folder == NULL) return -1;
    while ((entry = readdir(folder)) != NULL) {
        int number = atoi(entry->d_name);
        if (entry->d_name[0] == '.' || number == dirfd(folder)) continue;
        if (count == MOST_DESCRIPTORS) { count = -1; break; }
        found[count++] = number;
    }
    closedir(folder);
    return count;
}

/* The folder of this user's sockets, in memory. Returns 0 if nobody else can enter it. */
static int own_folder(char *path, size_t size)
{
    struct stat found;
    snprintf(path, size, "/dev/shm/hpctrain-fork-%u", (unsigned)geteuid());
    if (mkdir(path, 0700) != 0 && errno != EEXIST) return -1;
    if (lstat(path, &found) != 0 || !S_ISDIR(found.st_mode)) return -1;
    return found.st_uid == geteuid() && (found.st_mode & 077) == 0 ? 0 : -1;
}

/* Starts the server in a session of its own, with the listening socket as descriptor 3. Returns its process number, or -1.
   It is not a child of this process: Slurm, where it follows processes by their parents (proctrack/linuxproc), would end
   it with this step, and a supervisor's next step needs it. */
static pid_t start_server(char **server, int listens, const char *log)
{
    int tells[2];
    pid_t pid = -1, between;
    if (pipe2(tells, O_CLOEXEC) != 0) return -1;
    between = fork();
    if (between != 0) {
        close(tells[1]);
        if (between > 0 && read(tells[0], &pid, sizeof pid) != sizeof pid) pid = -1;
        close(tells[0]);
        if (between > 0) waitpid(between, NULL, 0);
        return pid;
    }
    pid = fork();
    if (pid != 0) _exit(write(tells[1], &pid, sizeof pid) == sizeof pid ? 0 : 1);
    int number, nothing = open("/dev/null", O_RDWR), errors = open(log, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW, 0600);
    setsid();
    if (listens == LISTENS_AT) fcntl(listens, F_SETFD, 0); else dup2(listens, LISTENS_AT);
    dup2(nothing, 0);
    dup2(nothing, 1);
    dup2(errors >= 0 ? errors : nothing, 2);
    for (number = LISTENS_AT + 1; number < 1024; number++) close(number);
    sigprocmask(SIG_SETMASK, &mask_before, NULL);
    setenv(ROOM, spaces, 1);
    execvp(server[0], server);
    _exit(127);
}

/* Returns a socket that is connected to the server, and its process number; NULL and -1, or why there is none. */
static const char *connect_to_server(char **server, const char *key, int *connection, pid_t *pid, char *log, size_t size)
{
    static char text[MOST_TEXT];
    char folder[64], path[256], host[65] = "", name[128];
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int lock;
    if (own_folder(folder, sizeof folder) != 0) return "/dev/shm has no folder that only this user can enter";
    gethostname(host, sizeof host - 1);
    snprintf(name, sizeof name, "%.40s-%.40s", key, host);
    if (strchr(name, '/') != NULL) return KEY " has a /";
    snprintf(log, size, "%s/%s.log", folder, name);
    snprintf(path, sizeof path, "%s/%s.lock", folder, name);
    if (snprintf(address.sun_path, sizeof address.sun_path, "%s/%s", folder, name) >= (int)sizeof address.sun_path)
        return "the socket's name is too long";
    for (;;) {
        struct stat opened, named;
        lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (lock < 0 || flock(lock, LOCK_EX) != 0 || fstat(lock, &opened) != 0) {
            snprintf(text, sizeof text, "%.200s: %s", path, strerror(errno));
            return text;
        }
        /* A server that has just ended has removed it. */
        if (stat(path, &named) == 0 && named.st_ino == opened.st_ino) break;
        close(lock);
    }
    *connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    *pid = 0;
    if (connect(*connection, (struct sockaddr *)&address, sizeof address) != 0) {
        int listens = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        unlink(address.sun_path);
        if (bind(listens, (struct sockaddr *)&address, sizeof address) != 0 || listen(listens, 4096) != 0) {
            snprintf(text, sizeof text, "%.200s: %s", address.sun_path, strerror(errno));
            return text;
        }
        *pid = start_server(server, listens, log);
        if (*pid < 0) return "no process for the fork server";
        if (ftruncate(lock, 0) != 0 || dprintf(lock, "%d", (int)*pid) < 0) return "the lock cannot be written";
        if (connect(*connection, (struct sockaddr *)&address, sizeof address) != 0) return "the fork server has ended";
        close(listens);
    } else {
        char digits[32] = "";
        if (pread(lock, digits, sizeof digits - 1, 0) > 0) *pid = (pid_t)atoi(digits);
    }
    close(lock);
    return NULL;
}

static int hand_over(int connection, const int *numbers, int count, int leash)
{
    int message[3 + MOST_DESCRIPTORS], passed[1 + MOST_DESCRIPTORS];
    char space[CMSG_SPACE(sizeof passed)];
    struct iovec data = {message, sizeof(int) * (size_t)(3 + count)};
    struct msghdr header = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = space};
    memcpy(message, &mask_before, 8);
    message[2] = count;
    memcpy(message + 3, numbers, sizeof(int) * (size_t)count);
    passed[0] = leash;
    memcpy(passed + 1, numbers, sizeof(int) * (size_t)count);
    header.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)(1 + count));
    struct cmsghdr *control = CMSG_FIRSTHDR(&header);
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)(1 + count));
    memcpy(CMSG_DATA(control), passed, sizeof(int) * (size_t)(1 + count));
    return sendmsg(connection, &header, MSG_NOSIGNAL) < 0 ? -1 : 0;
}

/* Returns a field of /proc/PID/stat, counted from 3 for the state, as a number or a character; -1 if it has ended. */
static long stat_field(pid_t pid, int wanted)
{
    char path[64], text[2048], *at;
    int number = 3;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return -1;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    if (length <= 0) return -1;
    text[length] = '\0';
    at = strrchr(text, ')');
    if (at == NULL) return -1;
    for (at += 2; number < wanted && at != NULL; number++) {
        at = strchr(at, ' ');
        if (at != NULL) at++;
    }
    if (at == NULL) return -1;
    return wanted == 3 ? *at : atol(at);
}

/* Waits for the server's answer. Returns 's' or 'r', or 0 if there is none. */
static char await_answer(int connection, pid_t server, pid_t *rank, int *pidfd, char *text)
{
    const char *limit = getenv(WAIT);
    double until_s = now_s() + (limit != NULL ? atof(limit) : 300.0);
    char answer[MOST_TEXT], space[CMSG_SPACE(sizeof(int))];
    for (;;) {
        struct pollfd wait = {.fd = connection, .events = POLLIN};
        int ready = poll(&wait, 1, 500);
        if (ready > 0) break;
        if (ready < 0 && errno != EINTR) return 0;
        if (now_s() > until_s) { strcpy(text, "the fork server is not ready in time"); return 0; }
        if (server > 0 && stat_field(server, 3) == 'T') { strcpy(text, "the fork server is suspended"); return 0; }
    }
    struct iovec data = {answer, sizeof answer - 1};
    struct msghdr header = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    ssize_t length = recvmsg(connection, &header, MSG_CMSG_CLOEXEC);
    if (length < 1) return 0;
    answer[length] = '\0';
    if (answer[0] == 'r') { strcpy(text, answer + 1); return 'r'; }
    struct cmsghdr *control = CMSG_FIRSTHDR(&header);
    if (answer[0] != 's' || control == NULL || control->cmsg_type != SCM_RIGHTS) return 0;
    memcpy(pidfd, CMSG_DATA(control), sizeof(int));
    *rank = (pid_t)atoi(answer + 1);
    return 's';
}

/* Ends this process as the rank has ended. status: as wait gives it. */
static void end_as(int status)
{
    if (WIFEXITED(status)) _exit(WEXITSTATUS(status));
    struct rlimit none = {0, 0};
    sigset_t one;
    setrlimit(RLIMIT_CORE, &none); /* the rank has left its core */
    signal(WTERMSIG(status), SIG_DFL);
    sigemptyset(&one);
    sigaddset(&one, WTERMSIG(status));
    kill(getpid(), WTERMSIG(status));
    sigprocmask(SIG_UNBLOCK, &one, NULL);
    _exit(128 + WTERMSIG(status));
}

/* Hands signals on to the rank until the server says how it ended. */
static void stand_for(pid_t rank, int pidfd, int signals, int connection, pid_t server)
{
    struct pollfd wait[3] = {{.fd = signals, .events = POLLIN}, {.fd = connection, .events = POLLIN}, {.fd = pidfd, .events = POLLIN}};
    int has_ended = 0;
    for (;;) {
        if (poll(wait, has_ended ? 2 : 3, has_ended ? 200 : -1) < 0) continue;
        if (wait[0].revents & POLLIN) {
            struct signalfd_siginfo got;
            while (read(signals, &got, sizeof got) == sizeof got)
                if (got.ssi_signo != SIGCHLD) syscall(SYS_pidfd_send_signal, pidfd, (int)got.ssi_signo, NULL, 0);
        }
        if (wait[1].revents) {
            char answer[32];
            ssize_t length = recv(connection, answer, sizeof answer - 1, 0);
            if (length < 2 || answer[0] != 'e') break;
            answer[length] = '\0';
            end_as(atoi(answer + 1));
        }
        has_ended = has_ended || (wait[2].revents & POLLIN);
        if (has_ended && server > 0 && stat_field(server, 3) == 'T') kill(server, SIGCONT);
    }
    syscall(SYS_pidfd_send_signal, pidfd, SIGKILL, NULL, 0);
    fprintf(stderr, "hpctrain launch: the fork server of this node was ended, and with it process %d, a rank\n", (int)rank);
    end_as(SIGKILL);
}

int main(int argc, char **argv)
{
    const char *key = getenv(KEY), *reason;
    static char text[MOST_TEXT], log[256];
    int numbers[MOST_DESCRIPTORS], leash[2], count, connection = -1, pidfd = -1, last = 1, tries = 0;
    pid_t server = 0, rank = 0;
    sigset_t all;
    while (last < argc && strcmp(argv[last], "--") != 0) last++;
    if (last + 1 >= argc || last < 2) {
        fprintf(stderr, "usage: %s SERVER... -- COMMAND...\n", argv[0]);
        return 2;
    }
    command = argv + last + 1;
    sigprocmask(SIG_SETMASK, NULL, &mask_before);
    if (key == NULL || *key == '\0') start_here(NULL);
    count = open_descriptors(numbers);
    if (count < 0) start_here("it has too many open files");
    argv[last] = NULL;
    /* The server gets COMMAND too, and finds there what to import. */
    char **words = calloc((size_t)argc + 1, sizeof *words);
    for (int word = 1, at = 0; word < argc; word++) if (word != last) words[at++] = argv[word];
    memset(spaces, ' ', sizeof spaces - 1);
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    for (;;) {
        char answer = 0;
        reason = connect_to_server(words, key, &connection, &server, log, sizeof log);
        if (reason != NULL) start_here(reason);
        if (pipe2(leash, O_CLOEXEC) != 0) start_here("it has too many open files");
        if (hand_over(connection, numbers, count, leash[0]) == 0) answer = await_answer(connection, server, &rank, &pidfd, text);
        close(leash[0]);
        if (answer == 's') break;
        if (answer == 'r' || *text != '\0') start_here(text);
        close(connection);
        close(leash[1]);
        /* It may have ended while this process connected; the next one is started. */
        if (++tries == 2) {
            snprintf(text, sizeof text, "the fork server has ended; what it said is in %s", log);
            start_here(text);
        }
    }
    int signals = signalfd(-1, &all, SFD_CLOEXEC | SFD_NONBLOCK);
    stand_for(rank, pidfd, signals, connection, server);
    return 1;
}
