/* A plugin for CRIU (3.17 and newer) with which a process that holds an RDMA device can be dumped and
 * restored. CRIU refuses such a process otherwise: it can neither dump the descriptors of the device
 * (/dev/infiniband/uverbsN and its event files) nor the queues that the device maps into the process.
 *
 * Dump: the plugin notes what each descriptor was. Restore: it opens the device again, puts an event
 * file that stays silent in the place of each event file, and memory of the process's own in the place of
 * each queue. The device's objects are gone by that; who restores them is libgodwit_verbs, which gives
 * them back before a dump and makes them again after it. A process without that library goes on with
 * everything but verbs: its verbs fail, and its completion queues stay empty.
 *
 * What CRIU demands of a plugin is declared here, so that building it needs no header of CRIU's. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

/* CRIU's interface to plugins, version 0.2. */
enum {
	HOOK_DUMP_EXT_FILE = 2,
	HOOK_RESTORE_EXT_FILE = 3,
	HOOK_HANDLE_DEVICE_VMA = 7,
	HOOK_UPDATE_VMA_MAP = 8,
	HOOKS = 10,
};

struct criu_plugin {
	const char *name;
	int (*init)(int stage);
	void (*exit)(int stage, int result);
	unsigned int version;
	unsigned int max_hooks;
	void *hooks[HOOKS];
};

extern int criu_get_image_dir(void);

/* The kernel's fixed number for /dev/infiniband/uverbs*. */
#define UVERBS_MAJOR 231
#define DEVICE_PREFIX "/dev/infiniband/uverbs"
#define EVENT_FILE "anon_inode:[infinibandevent]"

/* Queues beyond this are not from a device that exists. */
#define LARGEST_QUEUE (1ll << 30)

static int is_ours(const char *target)
{
	return !strncmp(target, DEVICE_PREFIX, strlen(DEVICE_PREFIX)) || !strcmp(target, EVENT_FILE);
}

/* The image that says what descriptor `id` was. */
static int image(int id, int flags)
{
	char name[64];

	snprintf(name, sizeof(name), "godwit-rdma-%d.img", id);
	return openat(criu_get_image_dir(), name, flags | O_CLOEXEC, 0600);
}

static int dump_ext_file(int fd, int id)
{
	char path[64], target[PATH_MAX];
	ssize_t length;
	int out;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	length = readlink(path, target, sizeof(target) - 1);
	if (length < 0)
		return -errno;
	target[length] = 0;
	if (!is_ours(target))
		return -ENOTSUP;
	out = image(id, O_CREAT | O_TRUNC | O_WRONLY);
	if (out < 0)
		return -errno;
	if (write(out, target, length) != length) {
		close(out);
		return -EIO;
	}
	return close(out) ? -errno : 0;
}

static int restore_ext_file(int id)
{
	char target[PATH_MAX];
	ssize_t length;
	int in = image(id, O_RDONLY), fd;

	if (in < 0)
		return -ENOTSUP;
	length = read(in, target, sizeof(target) - 1);
	close(in);
	if (length <= 0)
		return -EIO;
	target[length] = 0;
	/* The image may come from another host: nothing but what a dump writes is opened. */
	if (!is_ours(target) || strstr(target, ".."))
		return -EINVAL;
	fd = !strcmp(target, EVENT_FILE) ? eventfd(0, EFD_CLOEXEC) : open(target, O_RDWR | O_CLOEXEC);
	return fd < 0 ? -errno : fd;
}

static int handle_device_vma(int fd, const struct stat *status)
{
	(void)fd;
	return S_ISCHR(status->st_mode) && major(status->st_rdev) == UVERBS_MAJOR ? 0 : -ENOTSUP;
}

/* CRIU maps what the plugin answers with at the queue's address. */
static int update_vma_map(const char *path, const uint64_t address, const uint64_t old_offset, uint64_t *new_offset,
			  int *plugin_fd)
{
	int fd;

	(void)address;
	(void)old_offset;
	if (strncmp(path, DEVICE_PREFIX, strlen(DEVICE_PREFIX)))
		return -ENOTSUP;
	fd = memfd_create("godwit-rdma-queue", MFD_CLOEXEC);
	if (fd < 0)
		return -errno;
	/* The hook is not told how long the queue is. A sparse file costs what is touched. */
	if (ftruncate(fd, LARGEST_QUEUE)) {
		close(fd);
		return -errno;
	}
	*new_offset = 0;
	*plugin_fd = fd;
	return 1;
}

static int init(int stage)
{
	(void)stage;
	return 0;
}

static void leave(int stage, int result)
{
	(void)stage;
	(void)result;
}

__attribute__((visibility("default"))) struct criu_plugin CR_PLUGIN_DESC = {
	.name = "godwit_rdma",
	.init = init,
	.exit = leave,
	.version = (0 << 16) + (2 << 8) + 0,
	.max_hooks = HOOKS,
	.hooks = {
		[HOOK_DUMP_EXT_FILE] = (void *)dump_ext_file,
		[HOOK_RESTORE_EXT_FILE] = (void *)restore_ext_file,
		[HOOK_HANDLE_DEVICE_VMA] = (void *)handle_device_vma,
		[HOOK_UPDATE_VMA_MAP] = (void *)update_vma_map,
	},
};
