/* fspeer: the practical limit of the protocol.
 *
 * A minimal blocking server for fsclient: one thread per client, one buffer,
 * no policy, no root, no table that is shared, no care for a hostile client.
 * What a host spends beyond it is the price of being a host. Not a server for
 * anything but measurements.
 *
 * Usage: fspeer [-n CLIENTS] [-p] -- CLIENT [ARG]...
 *
 *   -n   how many copies of CLIENT to start, each with its own connection (1)
 *   -p   two pipes (FD 3 to read, FD 4 to write) instead of a socketpair
 *
 * Exits 0 if every client did.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    BUFFER_BYTES = 2 << 20, /* holds the largest request and the largest reply */
    FILES = 4096,           /* open files a client, far above what a test opens */
    FIRST_FILENO = 1000,
    CLIENTS = 256,
};

struct connection {
    int in_fd, out_fd;
    char *input;
    size_t begin, end;
    char *output;
    int files[FILES];
    unsigned opened;
};

static void reply(struct connection *c, const char *head, size_t head_bytes,
                  const char *body, size_t body_bytes) {
    struct iovec part[2] = {{(void *)head, head_bytes}, {(void *)body, body_bytes}};
    struct iovec *next = part;
    int parts = body_bytes ? 2 : 1;
    while (parts) {
        ssize_t sent = writev(c->out_fd, next, parts);
        if (sent < 0) {
            if (errno == EINTR)
                continue;
            return; /* the client is gone: the next receive says so */
        }
        while (parts && (size_t)sent >= next->iov_len) {
            sent -= next->iov_len;
            next++;
            parts--;
        }
        if (parts) {
            next->iov_base = (char *)next->iov_base + sent;
            next->iov_len -= sent;
        }
    }
}

static void reply_number(struct connection *c, unsigned long number) {
    char head[32];
    reply(c, head, snprintf(head, sizeof head, "OK %lu\n", number), NULL, 0);
}

static void reply_error(struct connection *c, const char *text) {
    reply(c, text, strlen(text), NULL, 0);
}

/* Appends what the client sent; 0 when nothing more will come. */
static int receive(struct connection *c) {
    if (c->begin == c->end) {
        c->begin = c->end = 0;
    } else if (c->end == BUFFER_BYTES) {
        c->end -= c->begin;
        memmove(c->input, c->input + c->begin, c->end);
        c->begin = 0;
        if (c->end == BUFFER_BYTES)
            return 0;
    }
    ssize_t got;
    do
        got = read(c->in_fd, c->input + c->end, BUFFER_BYTES - c->end);
    while (got < 0 && errno == EINTR);
    if (got <= 0)
        return 0;
    c->end += got;
    return 1;
}

static int *file_of(struct connection *c, unsigned long fileno) {
    return &c->files[(fileno - FIRST_FILENO) % FILES];
}

static void serve_open(struct connection *c, const char *arguments) {
    char path[1024], mode[16], claim[16];
    if (sscanf(arguments, "%1023s %15s %15s", path, mode, claim) != 3) {
        reply_error(c, "ERROR OPEN requires filename, mode, and is_top_level\n");
        return;
    }
    int flags = *mode == 'r' ? O_RDONLY : O_WRONLY | O_CREAT | O_TRUNC;
    int fd = open(path, flags | O_CLOEXEC, 0666);
    if (fd < 0) {
        reply_error(c, "ERROR failed to open file\n");
        return;
    }
    unsigned long fileno = FIRST_FILENO + c->opened++;
    *file_of(c, fileno) = fd;
    reply_number(c, fileno);
}

static void serve_read(struct connection *c, const char *arguments) {
    char *rest;
    char head[32];
    unsigned long fileno = strtoul(arguments, &rest, 10);
    size_t size = strtoul(rest, NULL, 10);
    if (size > BUFFER_BYTES)
        size = BUFFER_BYTES;
    ssize_t got = read(*file_of(c, fileno), c->output, size);
    if (got < 0) {
        reply_error(c, "ERROR failed to read\n");
        return;
    }
    int head_bytes = snprintf(head, sizeof head, "OK %zd\n", got);
    reply(c, head, head_bytes, c->output, got);
}

/* Passes the payload on as it arrives; 0 when the client ended inside it. */
static int serve_write(struct connection *c, const char *arguments) {
    char *rest;
    int fd = *file_of(c, strtoul(arguments, &rest, 10));
    size_t size = strtoul(rest, NULL, 10), left = size;
    while (left) {
        if (c->begin == c->end && !receive(c))
            return 0;
        size_t piece = c->end - c->begin < left ? c->end - c->begin : left;
        if (write(fd, c->input + c->begin, piece) != (ssize_t)piece)
            return 0;
        c->begin += piece;
        left -= piece;
    }
    reply_number(c, size);
    return 1;
}

static void serve_close(struct connection *c, const char *arguments) {
    int *file = file_of(c, strtoul(arguments, NULL, 10));
    close(*file);
    *file = -1;
    reply(c, "OK\n", 3, NULL, 0);
}

static int serve_one(struct connection *c) {
    char *end;
    while (!(end = memchr(c->input + c->begin, '\n', c->end - c->begin)))
        if (!receive(c))
            return 0;
    *end = 0;
    char *line = c->input + c->begin;
    c->begin = end + 1 - c->input;
    if (!strncmp(line, "READ ", 5))
        serve_read(c, line + 5);
    else if (!strncmp(line, "WRITE ", 6))
        return serve_write(c, line + 6);
    else if (!strncmp(line, "OPEN ", 5))
        serve_open(c, line + 5);
    else if (!strncmp(line, "CLOSE ", 6))
        serve_close(c, line + 6);
    else
        reply_error(c, "ERROR unknown command\n");
    return 1;
}

static void *serve(void *argument) {
    struct connection *c = argument;
    while (serve_one(c))
        ;
    for (int i = 0; i < FILES; i++)
        if (c->files[i] >= 0)
            close(c->files[i]);
    close(c->in_fd);
    if (c->out_fd != c->in_fd)
        close(c->out_fd);
    return NULL;
}

static void start_client(struct connection *c, int pipes, char **command) {
    int theirs[2];
    if (pipes) {
        int down[2], up[2];
        if (pipe2(down, O_CLOEXEC) || pipe2(up, O_CLOEXEC))
            exit(1);
        theirs[0] = down[0], c->out_fd = down[1];
        c->in_fd = up[0], theirs[1] = up[1];
    } else {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair))
            exit(1);
        c->in_fd = c->out_fd = pair[0];
        theirs[0] = theirs[1] = pair[1];
    }
    if (!fork()) {
        /* Out of the way of 3 and 4 first, then onto them without CLOEXEC. */
        int from = fcntl(theirs[0], F_DUPFD_CLOEXEC, 10);
        int to = fcntl(theirs[1], F_DUPFD_CLOEXEC, 10);
        dup2(from, 3);
        if (pipes)
            dup2(to, 4);
        setenv("FSPROXY_FD", pipes ? "3,4" : "3", 1);
        setenv("FSPROXY_TOP_LEVEL", "true", 1);
        execv(*command, command);
        _exit(127);
    }
    close(theirs[0]);
    if (pipes)
        close(theirs[1]);
}

int main(int argc, char **argv) {
    int clients = 1, pipes = 0, option;
    while ((option = getopt(argc, argv, "+n:p")) != -1) {
        if (option == 'n')
            clients = atoi(optarg);
        else if (option == 'p')
            pipes = 1;
        else
            return 2;
    }
    if (optind == argc || clients < 1 || clients > CLIENTS) {
        fputs("usage: fspeer [-n CLIENTS] [-p] -- CLIENT [ARG]...\n", stderr);
        return 2;
    }
    static struct connection connections[CLIENTS];
    pthread_t threads[CLIENTS];
    for (int i = 0; i < clients; i++) {
        struct connection *c = &connections[i];
        c->input = malloc(BUFFER_BYTES);
        c->output = malloc(BUFFER_BYTES);
        if (!c->input || !c->output)
            return 1;
        memset(c->files, -1, sizeof c->files);
        start_client(c, pipes, argv + optind);
    }
    for (int i = 0; i < clients; i++)
        if (pthread_create(&threads[i], NULL, serve, &connections[i]))
            return 1;
    for (int i = 0; i < clients; i++)
        pthread_join(threads[i], NULL);
    int status, failed = 0;
    while (wait(&status) > 0)
        failed |= status != 0;
    return failed;
}
