/*
 * The part of the mover that runs inside QEMU: `vm run` preloads it (LD_PRELOAD), and nothing in QEMU calls it.
 *
 * It listens at the unix socket that GODWIT_MEMORY_AGENT names, serves one node at a time, and moves the guest's
 * memory chunk by chunk from the file that QEMU maps to another one (the zero-copy migration paper, figure 4). A run
 * of chunks is a single request: when the node dies, no page stays held. Each path that leaves a held chunk lets go
 * of it.
 *
 * Requests and answers are structures of 64 bytes in the host's byte order: src/mover/protocol.rs has the other side.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
/* Linux 6.4 and 6.7: the C library's headers may be older. */
#ifndef UFFD_FEATURE_WP_UNPOPULATED
#define UFFD_FEATURE_WP_UNPOPULATED (1 << 13)
#endif
#ifndef UFFD_FEATURE_WP_ASYNC
#define UFFD_FEATURE_WP_ASYNC (1 << 15)
#endif
#ifndef USERFAULTFD_IOC_NEW
#define USERFAULTFD_IOC_NEW _IO(0xAA, 0x00)
#endif

#define MAGIC UINT64_C(0x32544d474f44)

#define PAGE UINT64_C(4096)
/* Bytes between two looks at the clock while a chunk is held. */
#define PIECE UINT64_C(65536)
/* Bytes of memory that are looked at together when its page tables are filled. */
#define WINDOW UINT64_C(2097152)

enum { HELLO = 1, BEGIN = 2, MOVE = 3, END = 4, TRACK = 5, UNTRACK = 6, FILL = 7 };

struct request {
    uint64_t magic;
    uint64_t kind;
    union {
        uint64_t address; /* BEGIN, TRACK: where QEMU has the memory. FILL: a part of it. */
        uint64_t ahead;   /* MOVE: bytes that move after the run. */
    };
    uint64_t bytes;   /* BEGIN, TRACK: all of it. MOVE: of the run. FILL: of the part. */
    uint64_t offset;  /* BEGIN: of the memory in its file. MOVE: of the run in the memory. */
    union {
        uint64_t target; /* BEGIN: of the memory in the file that it goes to. */
        uint64_t chunk;  /* MOVE: bytes of a chunk, at most. */
    };
    uint64_t hold_ns; /* MOVE: how long a chunk may be held. */
    union {
        uint64_t keeps;     /* BEGIN: whether that file has room for it already, and keeps it. */
        uint64_t downwards; /* MOVE: whether the run's end moves first. */
    };
};

struct answer {
    uint64_t magic;
    int64_t error;     /* 0, or an errno. */
    uint64_t longest_ns; /* How long a chunk was held, at most. */
    uint64_t copied;   /* Bytes that were copied; less than have moved where there are holes. */
    uint64_t moved;    /* Bytes that have moved, from the end of the run that moves first. */
    uint64_t chunks;   /* So many. */
    uint64_t held_ns;  /* How long they were held in all. */
    uint64_t unused;
};

/* One move of the memory, under way. */
static struct {
    char *memory;
    uint64_t bytes;
    int from, to, faults;
    off_t from_offset, to_offset; /* Of the memory in these files. */
    int keeps; /* Whether the target's room stays the memory's: it is full of what was there before. */
    uint64_t room, room_end; /* Bytes of the target that got room for the next run: none of QEMU's mappings has them. */
} moving = { .from = -1, .to = -1, .faults = -1 };

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* Lets the first write to each protected page go on unseen; who wrote what is in the process's pagemap. */
static int tracking = -1;

/* What holds writers in the kernel as well. */
#define HOLDS (UFFD_FEATURE_PAGEFAULT_FLAG_WP | UFFD_FEATURE_WP_HUGETLBFS_SHMEM)
/* What lets them go on. Pages that are not there yet count as well. */
#define TRACKS (HOLDS | UFFD_FEATURE_WP_UNPOPULATED | UFFD_FEATURE_WP_ASYNC)

/* A userfaultfd with these features, or -errno. `device` is an open /dev/userfaultfd, or -1. */
static int open_faults(int device, uint64_t features)
{
    int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && device >= 0)
        fd = ioctl(device, USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return -errno;
    struct uffdio_api api = { .api = UFFD_API, .features = features };
    if (ioctl(fd, UFFDIO_API, &api) < 0) {
        int error = errno;
        close(fd);
        return -error;
    }
    return fd;
}

/* Gives back the room that was made and not used. */
static void return_room(void)
{
    if (moving.room < moving.room_end)
        fallocate(moving.to, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, moving.to_offset + (off_t)moving.room,
            (off_t)(moving.room_end - moving.room));
    moving.room = moving.room_end = 0;
}

static void end_move(void)
{
    if (moving.faults >= 0) {
        struct uffdio_range range = { (uintptr_t)moving.memory, moving.bytes };
        /* Wakes whoever waits, and lets them write. */
        ioctl(moving.faults, UFFDIO_UNREGISTER, &range);
        close(moving.faults);
    }
    moving.faults = -1;
    return_room();
    /* The files stay open: a node that was started again finds local memory by them. */
}

/* `fds` are the file that the memory is in, the one that it goes to, and perhaps /dev/userfaultfd. */
static int begin_move(const struct request *request, int *fds)
{
    end_move();
    if (fds[0] < 0 || fds[1] < 0 || request->bytes == 0 || request->bytes % PAGE || request->address % PAGE
        || request->offset % PAGE || request->target % PAGE || request->offset > INT64_MAX - request->bytes
        || request->target > INT64_MAX - request->bytes || request->bytes > INT64_MAX)
        return EINVAL;
    if (moving.from >= 0)
        close(moving.from);
    if (moving.to >= 0)
        close(moving.to);
    moving.memory = (char *)(uintptr_t)request->address;
    moving.bytes = request->bytes;
    moving.from = fds[0];
    moving.to = fds[1];
    moving.from_offset = (off_t)request->offset;
    moving.to_offset = (off_t)request->target;
    moving.keeps = request->keeps != 0;
    fds[0] = fds[1] = -1;
    int faults = open_faults(fds[2], HOLDS);
    if (faults < 0) {
        end_move();
        return -faults;
    }
    moving.faults = faults;
    struct uffdio_register range = { .range = { request->address, moving.bytes },
        .mode = UFFDIO_REGISTER_MODE_WP };
    if (ioctl(faults, UFFDIO_REGISTER, &range) < 0) {
        int error = errno;
        close(moving.faults);
        moving.faults = -1;
        end_move();
        return error;
    }
    return 0;
}

static void end_tracking(void)
{
    /* Its end lifts all protection. */
    if (tracking >= 0)
        close(tracking);
    tracking = -1;
}

/* Tracks memory. Memory that moves meanwhile would be held by nobody: the kernel refuses both at once (EBUSY). */
static int begin_tracking(const struct request *request, int device)
{
    end_tracking();
    int faults = open_faults(device, TRACKS);
    if (faults < 0)
        return -faults;
    struct uffdio_register range = { .range = { request->address, request->bytes },
        .mode = UFFDIO_REGISTER_MODE_WP };
    if (ioctl(faults, UFFDIO_REGISTER, &range) < 0) {
        int error = errno;
        close(faults);
        return error;
    }
    tracking = faults;
    return 0;
}

static int protect(uint64_t offset, uint64_t bytes, int on)
{
    struct uffdio_writeprotect change = { .range = { (uintptr_t)moving.memory + offset, bytes },
        .mode = on ? UFFDIO_WRITEPROTECT_MODE_WP : 0 };
    return ioctl(moving.faults, UFFDIO_WRITEPROTECT, &change) < 0 ? errno : 0;
}

/* Lets go of a chunk that stays where it was. When the kernel refuses, everything is let go of: nobody may wait. */
static void let_go(uint64_t offset, uint64_t bytes)
{
    if (protect(offset, bytes, 0))
        end_move();
}

/* Copies bytes that are there. To write whole pages of the target costs less than to map it: nobody zeroes them first. */
static int copy_data(off_t at, off_t end)
{
    while (at < end) {
        ssize_t written = pwrite(moving.to, moving.memory + at, (size_t)(end - at), moving.to_offset + at);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return written < 0 ? errno : EIO;
        at += written;
    }
    return 0;
}

static int is_zero(const char *bytes, size_t count)
{
    return bytes[0] == 0 && memcmp(bytes, bytes + 1, count - 1) == 0;
}

/*
 * Copies pages of which the page cache has no content, at most a piece: they are holes, set aside and never written, or
 * swapped out. To read them tells, and makes no room in the source; SEEK_DATA would walk through all that is set aside up
 * to the next content, which may be the whole memory's rest.
 */
static int copy_absent(off_t at, off_t end, uint64_t *copied)
{
    static char content[PIECE];
    size_t bytes = (size_t)(end - at);
    ssize_t read;
    do
        read = pread(moving.from, content, bytes, moving.from_offset + at);
    while (read < 0 && errno == EINTR);
    /* A DAX device cannot be read, and has no holes. */
    int is_device = read < 0 && (errno == EINVAL || errno == ESPIPE);
    if (read < 0 && !is_device)
        return errno;
    if (!is_device && (size_t)read != bytes)
        return EIO;
    for (size_t page = 0; page < bytes; page += PAGE) {
        if (!is_device && is_zero(content + page, PAGE))
            continue;
        int error = copy_data(at + (off_t)page, at + (off_t)(page + PAGE));
        if (error)
            return error;
        *copied += PAGE;
    }
    return 0;
}

/*
 * Copies what is there of a piece; the target has zeroes where the source has holes, unless it is full of what was there
 * before: then it gets all.
 */
static int copy(uint64_t offset, uint64_t bytes, uint64_t *copied)
{
    unsigned char pages[PIECE / PAGE];
    if (!moving.keeps && mincore(moving.memory + offset, bytes, pages))
        return errno;
    for (uint64_t at = 0, end; at < bytes; at = end) {
        int is_there = moving.keeps || pages[at / PAGE] & 1;
        for (end = at + PAGE; end < bytes && (moving.keeps || (pages[end / PAGE] & 1) == is_there); end += PAGE)
            ;
        off_t from = (off_t)(offset + at), to = (off_t)(offset + end);
        int error = is_there ? copy_data(from, to) : copy_absent(from, to, copied);
        if (error)
            return error;
        *copied += is_there ? end - at : 0;
    }
    return 0;
}

/*
 * Moves a chunk, or as much of it as can be copied in half the time for which it may be held: the rest of that time is
 * for the remapping. `*bytes` becomes what has moved, from the end that moves first.
 */
static int move_chunk(const struct request *request, uint64_t offset, uint64_t *bytes, struct answer *answer)
{
    uint64_t all = *bytes, done = 0, before = answer->copied, begun = now();
    *bytes = 0;
    int error = protect(offset, all, 1);
    while (!error && done < all && (done == 0 || now() - begun < request->hold_ns / 2)) {
        uint64_t piece = all - done < PIECE ? all - done : PIECE;
        error = copy(request->downwards ? offset + all - done - piece : offset + done, piece, &answer->copied);
        done += piece;
    }
    uint64_t part = request->downwards ? offset + all - done : offset;
    if (!error) {
        void *at = mmap(moving.memory + part, done, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, moving.to,
            moving.to_offset + (off_t)part);
        error = at == MAP_FAILED ? errno : 0;
    }
    if (error) {
        let_go(offset, all);
        return error;
    }
    struct uffdio_range range = { (uintptr_t)moving.memory + part, done };
    ioctl(moving.faults, UFFDIO_WAKE, &range);
    if (done < all)
        let_go(request->downwards ? offset : offset + done, all - done);
    uint64_t held = now() - begun;
    *bytes = done;
    answer->moved += done;
    answer->chunks++;
    answer->held_ns += held;
    if (held > answer->longest_ns)
        answer->longest_ns = held;
    /*
     * So that the guest meets no page fault a page; it would only be slower without. To read is enough: nothing tracks
     * writes to the new mapping, so its pages can be written then, and the kernel maps their neighbours with them.
     */
    if (answer->copied > before)
        madvise(moving.memory + part, done, MADV_POPULATE_READ);
    return 0;
}

/* Memory that cannot be had is an error here and would be a signal later. */
static int make_room(uint64_t offset, uint64_t bytes)
{
    if (moving.keeps)
        return 0;
    while (fallocate(moving.to, FALLOC_FL_KEEP_SIZE, moving.to_offset + (off_t)offset, (off_t)bytes) < 0)
        if (errno != EINTR)
            return errno;
    return 0;
}

static int move_run(const struct request *request, struct answer *answer)
{
    uint64_t offset = request->offset, bytes = request->bytes;
    if (moving.faults < 0 || bytes == 0 || bytes % PAGE || offset % PAGE || offset > moving.bytes
        || bytes > moving.bytes - offset || request->chunk == 0 || request->chunk % PAGE)
        return EINVAL;
    if (moving.room <= offset && offset + bytes <= moving.room_end) {
        /* It is used from now on. */
        moving.room = moving.room_end = 0;
    } else {
        return_room();
        int error = make_room(offset, bytes);
        if (error)
            return error;
    }
    int error = 0;
    while (!error && answer->moved < bytes) {
        uint64_t left = bytes - answer->moved, chunk = left < request->chunk ? left : request->chunk;
        /* To let go of a chunk ends the move when the kernel refuses it. */
        error = moving.faults < 0 ? EIO
            : move_chunk(request, request->downwards ? offset + left - chunk : offset + answer->moved, &chunk, answer);
    }
    return error;
}

/* Makes room for what moves after a run that has moved, while nobody waits. What fails here fails again when it moves. */
static void make_room_ahead(const struct request *run)
{
    uint64_t ahead = run->ahead, end = run->offset + run->bytes;
    if (moving.keeps || ahead == 0 || ahead % PAGE || ahead > (run->downwards ? run->offset : moving.bytes - end))
        return;
    uint64_t offset = run->downwards ? run->offset - ahead : end;
    if (make_room(offset, ahead))
        return;
    moving.room = offset;
    moving.room_end = offset + ahead;
}

/*
 * Fills QEMU's page tables with what is in memory of a part of the guest's, so that a guest that comes here meets no page
 * fault a page. What is not there, or swapped out, stays as it is.
 */
static int fill(const struct request *request)
{
    uint64_t at = request->address, end = at + request->bytes;
    if (at % PAGE || request->bytes % PAGE || end < at)
        return EINVAL;
    while (at < end) {
        unsigned char there[WINDOW / PAGE];
        uint64_t bytes = end - at < WINDOW ? end - at : WINDOW, pages = bytes / PAGE;
        if (mincore((void *)(uintptr_t)at, bytes, there))
            return errno;
        for (uint64_t page = 0; page < pages;) {
            uint64_t first = page;
            while (page < pages && (there[page] & 1))
                page++;
            if (page > first)
                madvise((void *)(uintptr_t)(at + first * PAGE), (page - first) * PAGE, MADV_POPULATE_READ);
            else
                page++;
        }
        at += bytes;
    }
    return 0;
}

/* Files that can come with a request, of which at most three are used: all for which the control message has room. */
#define FILES 4

static void serve(int node)
{
    for (;;) {
        struct request request;
        int fds[FILES] = { -1, -1, -1, -1 };
        _Static_assert(CMSG_SPACE(sizeof fds) == CMSG_LEN(sizeof fds), "the kernel fills padding with files too");
        union {
            char space[CMSG_SPACE(sizeof fds)];
            struct cmsghdr align;
        } control;
        struct iovec part = { &request, sizeof request };
        struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.space,
            .msg_controllen = sizeof control.space };
        ssize_t got = recvmsg(node, &message, MSG_CMSG_CLOEXEC | MSG_WAITALL);
        if (got < 0 && errno == EINTR)
            continue;
        for (struct cmsghdr *c = got > 0 ? CMSG_FIRSTHDR(&message) : NULL; c; c = CMSG_NXTHDR(&message, c))
            if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
                memcpy(fds, CMSG_DATA(c), c->cmsg_len - CMSG_LEN(0));
        if (got != sizeof request || request.magic != MAGIC) {
            for (int i = 0; i < FILES; i++)
                if (fds[i] >= 0)
                    close(fds[i]);
            return;
        }
        struct answer answer = { .magic = MAGIC };
        switch (request.kind) {
        case HELLO: {
            int faults = open_faults(fds[0], HOLDS);
            if (faults >= 0)
                close(faults);
            answer.error = faults < 0 ? -faults : 0;
            break;
        }
        case BEGIN:
            answer.error = begin_move(&request, fds);
            break;
        case MOVE:
            answer.error = move_run(&request, &answer);
            break;
        case END:
            end_move();
            break;
        case TRACK:
            answer.error = begin_tracking(&request, fds[0]);
            break;
        case UNTRACK:
            end_tracking();
            break;
        case FILL:
            answer.error = fill(&request);
            break;
        default:
            answer.error = EINVAL;
        }
        for (int i = 0; i < FILES; i++)
            if (fds[i] >= 0)
                close(fds[i]);
        if (send(node, &answer, sizeof answer, MSG_NOSIGNAL) != sizeof answer)
            return;
        if (request.kind == MOVE && answer.error == 0)
            make_room_ahead(&request);
    }
}

static void *listen_forever(void *listener)
{
    for (;;) {
        int node = accept4((int)(intptr_t)listener, NULL, NULL, SOCK_CLOEXEC);
        if (node < 0) {
            if (errno != EINTR && errno != ECONNABORTED)
                usleep(100000);
            continue;
        }
        serve(node);
        close(node);
        /* The chunks that have moved stay where they are; whoever comes next goes on. */
        end_move();
        end_tracking();
    }
    return NULL;
}

__attribute__((constructor)) static void start(void)
{
    const char *path = getenv("GODWIT_MEMORY_AGENT");
    /* Programs that QEMU starts are not QEMU. */
    unsetenv("LD_PRELOAD");
    if (!path)
        return;
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    if (strlen(path) < sizeof address.sun_path) {
        strcpy(address.sun_path, path);
        int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        unlink(path);
        sigset_t all, before;
        pthread_t thread;
        if (listener >= 0 && bind(listener, (struct sockaddr *)&address, sizeof address) == 0
            && listen(listener, 1) == 0) {
            /* QEMU's signals are for QEMU's threads. */
            sigfillset(&all);
            pthread_sigmask(SIG_SETMASK, &all, &before);
            if (pthread_create(&thread, NULL, listen_forever, (void *)(intptr_t)listener) == 0)
                pthread_detach(thread);
            pthread_sigmask(SIG_SETMASK, &before, NULL);
        } else if (listener >= 0) {
            close(listener);
        }
    }
    unsetenv("GODWIT_MEMORY_AGENT");
}
