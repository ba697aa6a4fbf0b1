/* fsclient: the child's side of every wire measurement.
 *
 * A synchronous FS Proxy client (dialect 2): one request, one reply, no
 * pipelining, so a figure is the cost of whole round trips.
 *
 * Usage: fsclient FD DIR SECONDS[@START] TEST[,TEST...]
 *
 *   FD       descriptor of the connection; FSPROXY_FD ("3" or "3,4") wins over it
 *   DIR      holds read.dat (64 MiB, made by the caller); writes go to DIR/w.PID
 *   SECONDS  length of each test
 *   START    CLOCK_MONOTONIC seconds at which printed tests may begin; warm-ups
 *            run until then, which lines many clients up. Too late is an error.
 *   TEST     openclose, read1 read4k read64k read1m, write1 write4k write64k
 *            write1m, mix; "~TEST" is a warm-up: it runs and prints nothing
 *
 * `mix` is a client that does not repeat itself: of 20 requests 12 are READs of one
 * file and 6 are WRITEs to another, of 1 to 4093 bytes and each of another size than
 * the one before, and each 20 have an OPEN and a CLOSE of a file with another name.
 *
 * Prints per test: NAME OPS SECONDS OPS/S MB/S P50_US P99_US
 * The claim in OPEN is FSPROXY_TOP_LEVEL of the environment, else "true".
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum {
    INPUT_BYTES = 4 << 20,   /* replies: one header and one payload, with room */
    PAYLOAD_BYTES = 1 << 20, /* the largest WRITE */
    FILE_BYTES = 64 << 20,   /* a handle is closed and opened anew after this */
    SAMPLES = 1 << 21,       /* latencies kept per test */
    MIX_NAMES = 509,         /* files that `mix` writes, one after the other */
};

static int in_fd, out_fd;
static const char *claim = "true";
static char *input;
static size_t input_begin, input_end;
static char *payload;
static float *samples;
static size_t sample_count;

static void fail(const char *format, ...) {
    va_list args;
    fputs("fsclient: ", stderr);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    exit(1);
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

/* Sends a request line and its payload, both in one writev where it fits. */
static void send_request(const char *line, size_t line_bytes, size_t payload_bytes) {
    struct iovec part[2] = {{(void *)line, line_bytes}, {payload, payload_bytes}};
    struct iovec *next = part;
    int parts = payload_bytes ? 2 : 1;
    while (parts) {
        ssize_t sent = writev(out_fd, next, parts);
        if (sent < 0) {
            if (errno == EINTR)
                continue;
            fail("cannot send a request: %s", strerror(errno));
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

static void receive(void) {
    if (input_end == INPUT_BYTES)
        fail("the host sent more than was asked for");
    ssize_t got = read(in_fd, input + input_end, INPUT_BYTES - input_end);
    if (got > 0)
        input_end += got;
    else if (got == 0)
        fail("the host closed the connection");
    else if (errno != EINTR)
        fail("cannot receive a reply: %s", strerror(errno));
}

/* Returns the next reply line, NUL-terminated, valid until the next call. */
static char *reply_line(void) {
    if (input_begin == input_end)
        input_begin = input_end = 0;
    size_t seen = input_begin;
    for (;;) {
        char *end = memchr(input + seen, '\n', input_end - seen);
        if (end) {
            char *line = input + input_begin;
            *end = 0;
            input_begin = end + 1 - input;
            return line;
        }
        seen = input_end;
        receive();
    }
}

/* Takes the number out of "OK N"; anything else ends the run. */
static unsigned long reply_number(const char *request) {
    char *line = reply_line();
    char *end;
    if (strncmp(line, "OK ", 3))
        fail("%s answered by: %s", request, line);
    unsigned long number = strtoul(line + 3, &end, 10);
    if (*end || end == line + 3)
        fail("%s answered by: %s", request, line);
    return number;
}

static unsigned long fs_open(const char *path, const char *mode) {
    char line[1200];
    int bytes = snprintf(line, sizeof line, "OPEN %s %s %s\n", path, mode, claim);
    send_request(line, bytes, 0);
    return reply_number("OPEN");
}

static void fs_close(unsigned long fileno) {
    char line[64];
    send_request(line, snprintf(line, sizeof line, "CLOSE %lu\n", fileno), 0);
    char *reply = reply_line();
    if (strcmp(reply, "OK"))
        fail("CLOSE answered by: %s", reply);
}

static void fs_read(unsigned long fileno, size_t size) {
    char line[64];
    int bytes = snprintf(line, sizeof line, "READ %lu %zu\n", fileno, size);
    send_request(line, bytes, 0);
    unsigned long got = reply_number("READ");
    if (got != size)
        fail("READ of %zu bytes gave %lu", size, got);
    while (input_end - input_begin < size)
        receive();
    input_begin += size;
}

static void fs_write(unsigned long fileno, size_t size) {
    char line[64];
    int bytes = snprintf(line, sizeof line, "WRITE %lu %zu\n", fileno, size);
    send_request(line, bytes, size);
    unsigned long got = reply_number("WRITE");
    if (got != size)
        fail("WRITE of %zu bytes gave %lu", size, got);
}

struct test {
    const char *name;
    const char *mode; /* NULL: OPEN and CLOSE are the operation themselves */
    size_t size_bytes;
};

static const struct test tests[] = {
    {"openclose", NULL, 0},        {"read1", "r", 1},
    {"read4k", "r", 4096},         {"read64k", "r", 65536},
    {"read1m", "r", 1 << 20},      {"write1", "w", 1},
    {"write4k", "w", 4096},        {"write64k", "w", 65536},
    {"write1m", "w", 1 << 20},     {"mix", "m", 0},
};

static const struct test *find_test(const char *name) {
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
        if (!strcmp(tests[i].name, name))
            return &tests[i];
    fail("unknown test %s", name);
    return NULL;
}

static int by_value(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static void print_result(const struct test *test, size_t ops, double taken_s) {
    float p50 = 0, p99 = 0;
    qsort(samples, sample_count, sizeof *samples, by_value);
    if (sample_count) {
        p50 = samples[sample_count / 2];
        p99 = samples[sample_count * 99 / 100];
    }
    printf("%s %zu %.4f %.1f %.2f %.1f %.1f\n", test->name, ops, taken_s,
           ops / taken_s, (double)ops * test->size_bytes / taken_s / 1e6, p50, p99);
    fflush(stdout);
}

/* Runs one test until the clock passes end_s; returns how many operations. */
static size_t run_test(const struct test *test, const char *path, double end_s) {
    unsigned long fileno = 0;
    size_t left = 0, ops = 0;
    double begun, done;
    int reading = test->mode && *test->mode == 'r';
    sample_count = 0;
    do {
        if (test->mode && left < test->size_bytes) {
            if (fileno)
                fs_close(fileno);
            fileno = fs_open(path, test->mode);
            left = FILE_BYTES;
        }
        begun = now_s();
        if (!test->mode)
            fs_close(fs_open(path, "r"));
        else if (reading)
            fs_read(fileno, test->size_bytes);
        else
            fs_write(fileno, test->size_bytes);
        done = now_s();
        left -= test->size_bytes;
        if (sample_count < SAMPLES)
            samples[sample_count++] = (done - begun) * 1e6;
        ops++;
    } while (done < end_s);
    if (fileno)
        fs_close(fileno);
    return ops;
}

/* Runs `mix` until the clock passes end_s; returns how many requests. */
static size_t run_mix(const char *read_path, const char *write_path, double end_s) {
    enum { SIZES = 4093, STEP = 1327, READS = 12, PERIOD = 20 };
    char name[1040];
    unsigned long reader = 0, writer = 0;
    size_t left = 0, ops = 0;
    double begun, done;
    sample_count = 0;
    do {
        size_t size = 1 + ops * STEP % SIZES, step = ops % PERIOD;
        if (left < size) {
            if (reader)
                fs_close(reader);
            reader = fs_open(read_path, "r");
            left = FILE_BYTES;
        }
        begun = now_s();
        if (step == 0) {
            snprintf(name, sizeof name, "%s.%zu", write_path, ops / PERIOD % MIX_NAMES);
            writer = fs_open(name, "w");
        } else if (step == PERIOD - 1) {
            fs_close(writer);
            writer = 0;
        } else if (step <= READS) {
            fs_read(reader, size);
            left -= size;
        } else {
            fs_write(writer, size);
        }
        done = now_s();
        if (sample_count < SAMPLES)
            samples[sample_count++] = (done - begun) * 1e6;
        ops++;
    } while (done < end_s);
    if (writer)
        fs_close(writer);
    fs_close(reader);
    return ops;
}

static void remove_mix(const char *write_path) {
    char name[1040];
    for (size_t i = 0; i < MIX_NAMES; i++) {
        snprintf(name, sizeof name, "%s.%zu", write_path, i);
        unlink(name);
    }
}

static void take_descriptors(const char *argument) {
    const char *given = getenv("FSPROXY_FD");
    char *rest;
    in_fd = out_fd = strtol(given ? given : argument, &rest, 10);
    if (*rest == ',')
        out_fd = strtol(rest + 1, NULL, 10);
}

int main(int argc, char **argv) {
    if (argc != 5) {
        fputs("usage: fsclient FD DIR SECONDS[@START] TEST[,TEST...]\n", stderr);
        return 2;
    }
    take_descriptors(argv[1]);
    if (getenv("FSPROXY_TOP_LEVEL"))
        claim = getenv("FSPROXY_TOP_LEVEL");
    char *rest;
    double seconds = strtod(argv[3], &rest);
    double start_s = *rest == '@' ? strtod(rest + 1, NULL) : 0;

    char read_path[1024], write_path[1024];
    snprintf(read_path, sizeof read_path, "%s/read.dat", argv[2]);
    snprintf(write_path, sizeof write_path, "%s/w.%d", argv[2], (int)getpid());
    input = malloc(INPUT_BYTES);
    payload = malloc(PAYLOAD_BYTES);
    samples = malloc(SAMPLES * sizeof *samples);
    if (!input || !payload || !samples)
        fail("out of memory");
    /* Touch every page now: a first fault inside a test would be its cost. */
    memset(input, 0, INPUT_BYTES);
    memset(payload, 'x', PAYLOAD_BYTES);
    memset(samples, 0, SAMPLES * sizeof *samples);

    char *save;
    for (char *name = strtok_r(argv[4], ",", &save); name;
         name = strtok_r(NULL, ",", &save)) {
        int warm_up = *name == '~';
        const struct test *test = find_test(name + warm_up);
        int writing = test->mode && *test->mode == 'w';
        double begun = now_s();
        if (warm_up && start_s && begun >= start_s)
            fail("came %.3f s too late for the common start", begun - start_s);
        double end_s = warm_up && start_s ? start_s : begun + seconds;
        int mixed = test->mode && *test->mode == 'm';
        size_t ops = mixed ? run_mix(read_path, write_path, end_s)
                           : run_test(test, writing ? write_path : read_path, end_s);
        if (!warm_up)
            print_result(test, ops, now_s() - begun);
        if (writing)
            unlink(write_path);
        if (mixed && !warm_up)
            remove_mix(write_path);
    }
    return 0;
}
