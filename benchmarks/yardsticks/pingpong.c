/* pingpong: the physical limit of one synchronous round trip.
 *
 * Two processes, 32 bytes there and 16 bytes back, nothing done in between.
 *
 * Usage: pingpong socketpair|pipe SECONDS
 * Prints: TRANSPORT ROUND_TRIPS SECONDS ROUND_TRIPS/S US_EACH
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { REQUEST_BYTES = 32, REPLY_BYTES = 16, BATCH = 64, WARM_UP = 2000 };

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

/* Reads exactly count bytes; 0 at the end of input. */
static int take(int fd, char *into, size_t count) {
    for (size_t got = 0; got < count;) {
        ssize_t n = read(fd, into + got, count - got);
        if (n <= 0)
            return 0;
        got += n;
    }
    return 1;
}

static void answer(int in_fd, int out_fd) {
    char request[REQUEST_BYTES], reply[REPLY_BYTES] = {0};
    while (take(in_fd, request, sizeof request))
        if (write(out_fd, reply, sizeof reply) != sizeof reply)
            return;
}

static int ask(int in_fd, int out_fd) {
    char request[REQUEST_BYTES] = {0}, reply[REPLY_BYTES];
    return write(out_fd, request, sizeof request) == sizeof request &&
           take(in_fd, reply, sizeof reply);
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fputs("usage: pingpong socketpair|pipe SECONDS\n", stderr);
        return 2;
    }
    int down[2], up[2]; /* replies, requests */
    if (!strcmp(argv[1], "pipe")) {
        if (pipe(down) || pipe(up))
            return 1;
    } else {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair))
            return 1;
        down[0] = up[1] = pair[0];
        down[1] = up[0] = pair[1];
    }
    pid_t other = fork();
    if (other < 0)
        return 1;
    if (!other) {
        close(up[1]);
        close(down[0]);
        answer(up[0], down[1]);
        _exit(0);
    }
    close(up[0]);
    close(down[1]);
    for (int i = 0; i < WARM_UP; i++)
        if (!ask(down[0], up[1]))
            return 1;
    double seconds = atof(argv[2]), begun = now_s(), taken;
    size_t trips = 0;
    do {
        for (int i = 0; i < BATCH; i++)
            if (!ask(down[0], up[1]))
                return 1;
        trips += BATCH;
        taken = now_s() - begun;
    } while (taken < seconds);
    printf("%s %zu %.4f %.1f %.2f\n", argv[1], trips, taken, trips / taken,
           taken / trips * 1e6);
    close(up[1]);
    close(down[0]);
    waitpid(other, NULL, 0);
    return 0;
}
