/* Disk faults on demand: a library to preload, through which every call goes that names, makes or changes a file.

   HACPO_FAULTS_ROOT   only calls on paths below this folder count
   HACPO_FAULTS_NAMES  words of the paths that stand for the same thing (agents' names), separated by commas
   HACPO_FAULTS_LOG    a file: one line per call, "process operation site"
   HACPO_FAULTS_FAIL   "errno mode occurrence operation site": at that call of that kind the call fails
   HACPO_FAULTS_SPENT  a file that is made when the call has failed, so that only one process fails it

   A site is the path below the root, with what differs between runs replaced: digits by #, hashes by H, names by A.
   Modes: `once`; `rest`, from then on every call that changes something fails, as on a full or read-only disk (for
   EMFILE every opening, for EIO every call).

   What it does not see: system calls made without libc, the C library's own (fwrite; fopen is seen), and writes through
   a mapped file. The environment is read at the start and by `faults_arm`. */

#define _GNU_SOURCE
#include <ctype.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX], spent[PATH_MAX], names[256], wanted_operation[32], wanted_site[PATH_MAX];
static size_t root_length;
static int log_file = -1, wanted_errno, rest, count, wanted_count, armed;

void faults_arm(void) {
    const char *value = getenv("HACPO_FAULTS_ROOT");
    root_length = 0;
    armed = 0;
    count = 0;
    if (log_file >= 0) syscall(SYS_close, log_file);
    log_file = -1;
    if (value == NULL || strlen(value) >= sizeof root) return;
    strcpy(root, value);
    root_length = strlen(root);
    value = getenv("HACPO_FAULTS_NAMES");
    snprintf(names, sizeof names, "%s", value ? value : "");
    value = getenv("HACPO_FAULTS_SPENT");
    snprintf(spent, sizeof spent, "%s", value ? value : "");
    value = getenv("HACPO_FAULTS_LOG");
    if (value != NULL) {
        int low = (int)syscall(SYS_openat, AT_FDCWD, value, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        log_file = low < 0 ? -1 : (int)syscall(SYS_fcntl, low, F_DUPFD_CLOEXEC, 700);
        if (low >= 0) syscall(SYS_close, low);
    }
    value = getenv("HACPO_FAULTS_FAIL");
    char mode[16];
    if (value != NULL && sscanf(value, "%d %15s %d %31s %4000s", &wanted_errno, mode, &wanted_count, wanted_operation,
                                wanted_site) == 5) {
        rest = strcmp(mode, "rest") == 0;
        armed = 1;
    }
}

__attribute__((constructor)) static void begin(void) { faults_arm(); }

/* --- sites ------------------------------------------------------------------------------------------------------- */

/* An absolute path without `.`, `..` and double slashes; links are taken as they are named. */
static int absolute(int folder, const char *path, char *out) {
    char whole[2 * PATH_MAX];
    if (path == NULL) return 0;
    if (path[0] == '/') {
        snprintf(whole, sizeof whole, "%s", path);
    } else {
        char base[PATH_MAX], link[64];
        ssize_t length;
        if (folder == AT_FDCWD) {
            length = syscall(SYS_getcwd, base, sizeof base - 1) - 1;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
            length = syscall(SYS_readlinkat, AT_FDCWD, link, base, sizeof base - 1);
        }
        if (length <= 0) return 0;
        base[length] = 0;
        snprintf(whole, sizeof whole, "%s/%s", base, path);
    }
    size_t length = 0;
    char *state, *part;
    for (part = strtok_r(whole, "/", &state); part != NULL; part = strtok_r(NULL, "/", &state)) {
        if (strcmp(part, ".") == 0) continue;
        if (strcmp(part, "..") == 0) {
            while (length > 0 && out[--length] != '/') continue;
            continue;
        }
        if (length + strlen(part) + 2 > PATH_MAX) return 0;
        out[length++] = '/';
        strcpy(out + length, part);
        length += strlen(part);
    }
    out[length] = 0;
    return 1;
}

static size_t run_of(const char *text, int (*kind)(int)) {
    size_t length = 0;
    while (text[length] && kind((unsigned char)text[length])) length++;
    return length;
}

static int is_hex(int letter) { return isdigit(letter) || (letter >= 'a' && letter <= 'f'); }
static int is_word(int letter) { return isalnum(letter) || letter == '_' || letter == '-'; }

static int is_name(const char *text, size_t length) {
    char word[64], *state, copy[sizeof names];
    if (length == 0 || length >= sizeof word) return 0;
    memcpy(word, text, length);
    word[length] = 0;
    strcpy(copy, names);
    for (char *name = strtok_r(copy, ",", &state); name != NULL; name = strtok_r(NULL, ",", &state))
        if (strcmp(name, word) == 0) return 1;
    return 0;
}

static void normalised(const char *path, char *out) {
    size_t at = 0, made = 0;
    while (path[at] && made < PATH_MAX - 8) {
        int begins = at == 0 || !isalnum((unsigned char)path[at - 1]);
        size_t hex = run_of(path + at, is_hex), word = run_of(path + at, is_word), letters = run_of(path + at, isalnum);
        int pair = hex == 2 && word == 2 && path[at + 2] == '/' && at > 0 && path[at - 1] == '/';
        if (begins && word == 22 && path[at + 22] == '.') {
            out[made++] = 'R';
            at += 22;
        } else if (begins && (pair || (hex >= 16 && hex == letters))) {
            out[made++] = 'H';
            at += hex;
        } else if (begins && letters == 9 && strncmp(path + at, "tmp", 3) == 0) { /* of a Rust library */
            made += (size_t)sprintf(out + made, "tmpR");
            at += letters;
        } else if (begins && word == 11 && strncmp(path + at, "tmp", 3) == 0 && path[at + 3] != '-') { /* of Python's tempfile */
            made += (size_t)sprintf(out + made, "tmpR");
            at += word;
        } else if (begins && is_name(path + at, letters)) {
            out[made++] = 'A';
            at += letters;
        } else if (isdigit((unsigned char)path[at])) {
            out[made++] = '#';
            at += run_of(path + at, isdigit);
        } else {
            out[made++] = path[at] == ' ' || path[at] == '\n' ? '?' : path[at];
            at++;
        }
    }
    out[made] = 0;
}

/* --- deciding ---------------------------------------------------------------------------------------------------- */

static int changes(const char *operation) {
    return strcmp(operation, "open-read") != 0 && strcmp(operation, "close") != 0;
}

/* Whether this call fails; errno says how. */
static int fails(const char *operation, int folder, const char *path) {
    char whole[PATH_MAX], site[PATH_MAX];
    if (root_length == 0) return 0;
    int before = errno;
    int known = absolute(folder, path, whole);
    errno = before;
    if (!known || strncmp(whole, root, root_length) != 0 || (whole[root_length] != '/' && whole[root_length])) return 0;
    normalised(whole[root_length] ? whole + root_length + 1 : ".", site);
    if (log_file >= 0) {
        char line[PATH_MAX + 64];
        int length = snprintf(line, sizeof line, "%d %s %s\n", (int)getpid(), operation, site);
        syscall(SYS_write, log_file, line, length);
    }
    errno = before;
    if (!armed) return 0;
    int is_spent = syscall(SYS_faccessat, AT_FDCWD, spent, F_OK) == 0;
    errno = before;
    if (is_spent && rest) {
        int hit = wanted_errno == EIO || (wanted_errno == EMFILE ? strncmp(operation, "open", 4) == 0 : changes(operation));
        if (strcmp(operation, "close") == 0) hit = 0;
        /* A full disk takes what needs no room; a read-only one takes nothing. */
        if (wanted_errno == ENOSPC && (strcmp(operation, "unlink") == 0 || strcmp(operation, "rmdir") == 0 ||
                                       strcmp(operation, "chmod") == 0 || strcmp(operation, "utime") == 0))
            hit = 0;
        if (hit) errno = wanted_errno;
        return hit;
    }
    if (is_spent || strcmp(operation, wanted_operation) != 0 || strcmp(site, wanted_site) != 0) return 0;
    if (__atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST) != wanted_count) return 0;
    int mark = (int)syscall(SYS_openat, AT_FDCWD, spent, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    errno = before;
    if (mark < 0) return 0;
    syscall(SYS_close, mark);
    errno = wanted_errno;
    return 1;
}

static int fails_open(const char *operation, int file) {
    char link[64], path[PATH_MAX];
    if (root_length == 0 || file < 0) return 0;
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    errno = before;
    if (length <= 0 || path[0] != '/') return 0;
    path[length] = 0;
    const char *deleted = " (deleted)";
    if ((size_t)length > strlen(deleted) && strcmp(path + length - strlen(deleted), deleted) == 0)
        path[length - strlen(deleted)] = 0;
    return fails(operation, AT_FDCWD, path);
}

/* --- the calls --------------------------------------------------------------------------------------------------- */

#define REAL(name) \
    static __typeof__(name) *real; \
    if (real == NULL) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static const char *opening(int flags) {
    if ((flags & O_TMPFILE) == O_TMPFILE) return "open-new";
    if (flags & O_CREAT) return "open-new";
    return (flags & O_ACCMODE) == O_RDONLY && !(flags & O_TRUNC) ? "open-read" : "open-write";
}

#define MODE_OF(flags) \
    mode_t mode = 0; \
    if (((flags) & O_CREAT) || ((flags) & O_TMPFILE) == O_TMPFILE) { \
        va_list rest_of_them; \
        va_start(rest_of_them, flags); \
        mode = va_arg(rest_of_them, mode_t); \
        va_end(rest_of_them); \
    }

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        MODE_OF(flags) \
        REAL(name); \
        return fails(opening(flags), AT_FDCWD, path) ? -1 : real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        MODE_OF(flags) \
        REAL(name); \
        return fails(opening(flags), folder, path) ? -1 : real(folder, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

/* What a fortified program calls where it gives no mode. */
#define CHECKED(name, PARAMETERS, ARGUMENTS, folder) \
    int name PARAMETERS; \
    int name PARAMETERS { \
        REAL(name); \
        return fails(opening(flags), folder, path) ? -1 : real ARGUMENTS; \
    }
CHECKED(__open_2, (const char *path, int flags), (path, flags), AT_FDCWD)
CHECKED(__open64_2, (const char *path, int flags), (path, flags), AT_FDCWD)
CHECKED(__openat_2, (int at, const char *path, int flags), (at, path, flags), at)
CHECKED(__openat64_2, (int at, const char *path, int flags), (at, path, flags), at)

int creat(const char *path, mode_t mode) {
    REAL(creat);
    return fails("open-new", AT_FDCWD, path) ? -1 : real(path, mode);
}

#define FOPEN(name) \
    FILE *name(const char *path, const char *mode) { \
        REAL(name); \
        const char *operation = mode[0] == 'r' ? (strchr(mode, '+') ? "open-write" : "open-read") : "open-new"; \
        return fails(operation, AT_FDCWD, path) ? NULL : real(path, mode); \
    }
FOPEN(fopen)
FOPEN(fopen64)

int mkstemp(char *template) {
    REAL(mkstemp);
    return fails("open-new", AT_FDCWD, template) ? -1 : real(template);
}

/* A refused write has written a part: that is what such a disk leaves. */
ssize_t write(int file, const void *bytes, size_t size) {
    REAL(write);
    if (!fails_open("write", file)) return real(file, bytes, size);
    int reason = errno;
    if (size > 1) (void)!real(file, bytes, size / 2);
    errno = reason;
    return -1;
}

#define PWRITE(name) \
    ssize_t name(int file, const void *bytes, size_t size, off_t at) { \
        REAL(name); \
        if (!fails_open("write", file)) return real(file, bytes, size, at); \
        int reason = errno; \
        if (size > 1) (void)!real(file, bytes, size / 2, at); \
        errno = reason; \
        return -1; \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

ssize_t writev(int file, const struct iovec *parts, int number) {
    REAL(writev);
    return fails_open("write", file) ? -1 : real(file, parts, number);
}

ssize_t pwritev(int file, const struct iovec *parts, int number, off_t at) {
    REAL(pwritev);
    return fails_open("write", file) ? -1 : real(file, parts, number, at);
}

#define SENDFILE(name) \
    ssize_t name(int to, int from, off_t *at, size_t size) { \
        REAL(name); \
        return fails_open("write", to) ? -1 : real(to, from, at, size); \
    }
SENDFILE(sendfile)
SENDFILE(sendfile64)

ssize_t copy_file_range(int from, off64_t *from_at, int to, off64_t *to_at, size_t size, unsigned flags) {
    REAL(copy_file_range);
    return fails_open("write", to) ? -1 : real(from, from_at, to, to_at, size, flags);
}

#define ON_FILE(name, operation, PARAMETERS, ARGUMENTS) \
    int name PARAMETERS { \
        REAL(name); \
        return fails_open(operation, file) ? -1 : real ARGUMENTS; \
    }
ON_FILE(fsync, "fsync", (int file), (file))
ON_FILE(fdatasync, "fsync", (int file), (file))
ON_FILE(syncfs, "fsync", (int file), (file))
ON_FILE(ftruncate, "truncate", (int file, off_t size), (file, size))
ON_FILE(ftruncate64, "truncate", (int file, off_t size), (file, size))
ON_FILE(fallocate, "truncate", (int file, int mode, off_t at, off_t size), (file, mode, at, size))
ON_FILE(fallocate64, "truncate", (int file, int mode, off_t at, off_t size), (file, mode, at, size))
ON_FILE(fchmod, "chmod", (int file, mode_t mode), (file, mode))
ON_FILE(futimens, "utime", (int file, const struct timespec times[2]), (file, times))

int posix_fallocate(int file, off_t at, off_t size) {
    REAL(posix_fallocate);
    return fails_open("truncate", file) ? errno : real(file, at, size);
}

int posix_fallocate64(int file, off_t at, off_t size) {
    REAL(posix_fallocate64);
    return fails_open("truncate", file) ? errno : real(file, at, size);
}

/* The file is closed all the same; so is a real one. */
int close(int file) {
    REAL(close);
    int failed = 0, reason = 0;
    if (root_length && file >= 0 && file != log_file) {
        int flags = (int)syscall(SYS_fcntl, file, F_GETFL);
        if (flags >= 0 && (flags & O_ACCMODE) != O_RDONLY) failed = fails_open("close", file);
        reason = errno;
    }
    int code = real(file);
    if (!failed) return code;
    errno = reason;
    return -1;
}

#define ON_PATH(name, operation, folder, PARAMETERS, ARGUMENTS) \
    int name PARAMETERS { \
        REAL(name); \
        return fails(operation, folder, path) ? -1 : real ARGUMENTS; \
    }
ON_PATH(mkdir, "mkdir", AT_FDCWD, (const char *path, mode_t mode), (path, mode))
ON_PATH(mkdirat, "mkdir", at, (int at, const char *path, mode_t mode), (at, path, mode))
ON_PATH(rmdir, "rmdir", AT_FDCWD, (const char *path), (path))
ON_PATH(unlink, "unlink", AT_FDCWD, (const char *path), (path))
ON_PATH(unlinkat, flags ? "rmdir" : "unlink", at, (int at, const char *path, int flags), (at, path, flags))
ON_PATH(truncate, "truncate", AT_FDCWD, (const char *path, off_t size), (path, size))
ON_PATH(truncate64, "truncate", AT_FDCWD, (const char *path, off_t size), (path, size))
ON_PATH(chmod, "chmod", AT_FDCWD, (const char *path, mode_t mode), (path, mode))
ON_PATH(fchmodat, "chmod", at, (int at, const char *path, mode_t mode, int flags), (at, path, mode, flags))
ON_PATH(utimes, "utime", AT_FDCWD, (const char *path, const struct timeval times[2]), (path, times))
ON_PATH(utimensat, "utime", at, (int at, const char *path, const struct timespec times[2], int flags),
        (at, path, times, flags))

/* Of calls with two paths the new one counts. */
ON_PATH(rename, "rename", AT_FDCWD, (const char *from, const char *path), (from, path))
ON_PATH(renameat, "rename", at, (int other, const char *from, int at, const char *path), (other, from, at, path))
ON_PATH(renameat2, "rename", at, (int other, const char *from, int at, const char *path, unsigned flags),
        (other, from, at, path, flags))
ON_PATH(link, "link", AT_FDCWD, (const char *from, const char *path), (from, path))
ON_PATH(linkat, "link", at, (int other, const char *from, int at, const char *path, int flags),
        (other, from, at, path, flags))
ON_PATH(symlink, "link", AT_FDCWD, (const char *from, const char *path), (from, path))
ON_PATH(symlinkat, "link", at, (const char *from, int at, const char *path), (from, at, path))
