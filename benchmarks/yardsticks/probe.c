/* probe: the smallest child that lives like one.
 *
 * Sends PING on FD 3, takes the time of the reply, may take up what a busy child
 * holds, says so on a FIFO, then waits for the end of its connection.
 *
 * Usage: probe FIFO [-f FILE] [-w FILE] [-g]
 *
 *   -f FILE  OPEN it 8 times
 *   -w FILE  OPEN it for writing, begin a WRITE of 1 MiB and send half of it
 *   -g       leave a grandchild in a session of its own that keeps FD 3 open
 *
 * Writes one line to FIFO: PID GRANDCHILD_PID (0: none) REPLY_TIME_NS
 * (CLOCK_MONOTONIC). It is below PIPE_BUF, so probes can share a FIFO.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { HOST_FD = 3, HANDLES = 8, WRITE_BYTES = 1 << 20 };

static char reply[256];

static void fail(const char *what) {
    fprintf(stderr, "probe: %s\n", what);
    exit(1);
}

/* Sends one line and returns the one-line reply. */
static const char *ask(const char *line) {
    size_t got = 0, bytes = strlen(line);
    if (write(HOST_FD, line, bytes) != (ssize_t)bytes)
        fail("cannot send a request");
    do {
        ssize_t n = read(HOST_FD, reply + got, sizeof reply - 1 - got);
        if (n <= 0)
            fail("cannot receive a reply");
        got += n;
    } while (reply[got - 1] != '\n');
    reply[got] = 0;
    if (strncmp(reply, "OK", 2))
        fail(reply);
    return reply;
}

static unsigned long open_file(const char *path, const char *mode) {
    const char *claim = getenv("FSPROXY_TOP_LEVEL");
    char line[1200];
    snprintf(line, sizeof line, "OPEN %s %s %s\n", path, mode,
             claim ? claim : "true");
    return strtoul(ask(line) + 3, NULL, 10);
}

static void begin_write(const char *path) {
    static char half[WRITE_BYTES / 2];
    char line[64];
    unsigned long fileno = open_file(path, "w");
    int bytes = snprintf(line, sizeof line, "WRITE %lu %d\n", fileno, WRITE_BYTES);
    if (write(HOST_FD, line, bytes) != bytes)
        fail("cannot begin the WRITE");
    for (size_t sent = 0; sent < sizeof half;) {
        ssize_t n = write(HOST_FD, half + sent, sizeof half - sent);
        if (n <= 0)
            fail("cannot send the payload");
        sent += n;
    }
}

static int leave_grandchild(void) {
    pid_t pid = fork();
    if (pid < 0)
        fail("cannot fork");
    if (!pid) {
        setsid();
        for (;;)
            pause();
    }
    return pid;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fputs("usage: probe FIFO [-f FILE] [-w FILE] [-g]\n", stderr);
        return 2;
    }
    struct timespec t;
    ask("PING\n");
    clock_gettime(CLOCK_MONOTONIC, &t);
    const char *fifo = argv[1];
    int option, grandchild = 0;
    optind = 2;
    while ((option = getopt(argc, argv, "f:w:g")) != -1) {
        if (option == 'f')
            for (int i = 0; i < HANDLES; i++)
                open_file(optarg, "r");
        else if (option == 'w')
            begin_write(optarg);
        else if (option == 'g')
            grandchild = leave_grandchild();
        else
            return 2;
    }
    int report = open(fifo, O_WRONLY | O_CLOEXEC);
    char line[96];
    int bytes = snprintf(line, sizeof line, "%d %d %lld\n", (int)getpid(), grandchild,
                         t.tv_sec * 1000000000LL + t.tv_nsec);
    if (report < 0 || write(report, line, bytes) != bytes)
        fail("cannot report on the FIFO");
    close(report);
    while (read(HOST_FD, reply, sizeof reply) > 0)
        ;
    return 0;
}
