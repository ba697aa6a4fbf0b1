/* bulk: the physical limit of moving a file's cached bytes to another process.
 *
 * The sender moves FILE again and again; the receiver reads into one buffer, as
 * any client must. The clock stops when the receiver has the last byte.
 *
 * Usage: bulk socketpair|pipe copy|sendfile|splice SECONDS FILE
 *
 *   copy      pread into a buffer, write from it
 *   sendfile  file -> socket or pipe in the kernel
 *   splice    file -> pipe in the kernel (pipe only)
 *
 * Prints: TRANSPORT METHOD BYTES SECONDS MB/S
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { CHUNK_BYTES = 1 << 20 };

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static ssize_t send_copy(int to, int file, off_t *at, char *buffer) {
    ssize_t got = pread(file, buffer, CHUNK_BYTES, *at);
    for (ssize_t done = 0; done < got;) {
        ssize_t n = write(to, buffer + done, got - done);
        if (n <= 0)
            return -1;
        done += n;
    }
    *at += got;
    return got;
}

static ssize_t send_file(int to, int file, off_t *at, char *buffer) {
    (void)buffer;
    return sendfile(to, file, at, CHUNK_BYTES);
}

static ssize_t send_splice(int to, int file, off_t *at, char *buffer) {
    (void)buffer;
    return splice(file, at, to, NULL, CHUNK_BYTES, 0);
}

/* Reads until the end of input; the last byte of its report is the finish. */
static int drain(int from, int report) {
    char *buffer = malloc(CHUNK_BYTES);
    ssize_t got;
    if (!buffer)
        return 1;
    memset(buffer, 0, CHUNK_BYTES);
    do
        got = read(from, buffer, CHUNK_BYTES);
    while (got > 0);
    return got < 0 || write(report, "k", 1) != 1;
}

int main(int argc, char **argv) {
    if (argc != 5) {
        fputs("usage: bulk socketpair|pipe copy|sendfile|splice SECONDS FILE\n",
              stderr);
        return 2;
    }
    ssize_t (*send)(int, int, off_t *, char *) =
        !strcmp(argv[2], "copy") ? send_copy
        : !strcmp(argv[2], "splice") ? send_splice : send_file;
    int ends[2], report[2];
    int piped = !strcmp(argv[1], "pipe");
    if (pipe(report) || (piped ? pipe(ends)
                               : socketpair(AF_UNIX, SOCK_STREAM, 0, ends)))
        return 1;
    if (piped)
        fcntl(ends[1], F_SETPIPE_SZ, CHUNK_BYTES);
    int file = open(argv[4], O_RDONLY);
    struct stat status;
    char *buffer = malloc(CHUNK_BYTES);
    if (file < 0 || fstat(file, &status) || status.st_size == 0 || !buffer) {
        perror(argv[4]);
        return 1;
    }
    memset(buffer, 0, CHUNK_BYTES);
    while (read(file, buffer, CHUNK_BYTES) > 0)
        ; /* into the page cache */
    pid_t other = fork();
    if (other < 0)
        return 1;
    if (!other) {
        close(ends[1]);
        _exit(drain(ends[0], report[1]));
    }
    close(ends[0]);
    double seconds = atof(argv[3]), begun = now_s();
    double bytes = 0;
    off_t at = 0;
    do {
        ssize_t sent = send(ends[1], file, &at, buffer);
        if (sent < 0) {
            perror("bulk");
            return 1;
        }
        bytes += sent;
        if (at >= status.st_size)
            at = 0;
    } while (now_s() - begun < seconds);
    close(ends[1]);
    char last;
    if (read(report[0], &last, 1) != 1)
        return 1;
    double taken = now_s() - begun;
    printf("%s %s %.0f %.4f %.1f\n", argv[1], argv[2], bytes, taken,
           bytes / taken / 1e6);
    waitpid(other, NULL, 0);
    return 0;
}
