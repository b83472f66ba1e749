/* Writes down what a process does to the files below a folder, so that any power cut can be played afterwards.
 *
 * Preloaded (LD_PRELOAD). POWERCUT_ROOT: the folder, resolved. POWERCUT_JOURNAL: a file outside of it, to which every
 * process adds records in one order. A record is a line `<operation> <inode> <bytes of path> <of second path> <of
 * content>`, followed by these bytes:
 *
 *   C inode path            a file was created          R path path    renamed        L inode path     linked
 *   W inode path content    its content when closed     U path         unlinked       Y path target    symbolic link
 *   S inode path content    its content when flushed    M inode path   mkdir          X path           rmdir
 *   D inode                 a folder was flushed
 *
 * What is written is not looked at: content is taken when a file is flushed or closed, which is all that a cut needs.
 * A rename by a system call of its own (Rust's tempfile) is not seen; the path of a later flush tells of it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))real(#name))
#define WRITES(flags) (((flags) & O_ACCMODE) != O_RDONLY)

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static int journal = -1;
static pid_t owner;

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

static int at_fork_set;
static void before_fork(void) { pthread_mutex_lock(&guard); }
static void after_fork(void) { pthread_mutex_unlock(&guard); }

static void begin(void) {
    if (!at_fork_set) { at_fork_set = 1; pthread_atfork(before_fork, after_fork, after_fork); }
    pthread_mutex_lock(&guard);
    if (owner != getpid()) { /* a child's lock must be its own */
        const char *path = getenv("POWERCUT_JOURNAL");
        owner = getpid();
        journal = path == NULL ? -1 : REAL(open)(path, O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
        if (journal >= 0) {
            int high = fcntl(journal, F_DUPFD_CLOEXEC, 700);
            if (high >= 0) { REAL(close)(journal); journal = high; }
        }
    }
    if (journal >= 0) flock(journal, LOCK_EX);
}

static void end(void) {
    int number = errno;
    if (journal >= 0) flock(journal, LOCK_UN);
    pthread_mutex_unlock(&guard);
    errno = number;
}

static void put(const void *bytes, size_t count) {
    const char *at = bytes;
    while (count > 0) {
        ssize_t done = write(journal, at, count);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) abort();
        at += done;
        count -= (size_t)done;
    }
}

static void record(char kind, unsigned long long inode, const char *path, const char *second, const char *content,
                   size_t count) {
    char line[96];
    size_t first = path ? strlen(path) : 0, other = second ? strlen(second) : 0;
    int number = errno;
    if (journal >= 0) {
        put(line, (size_t)snprintf(line, sizeof line, "%c %llu %zu %zu %zu\n", kind, inode, first, other, count));
        put(path, first);
        put(second, other);
        put(content, count);
    }
    errno = number;
}

/* The absolute path, if it lies below the root. */
static const char *below(int folder, const char *path, char *into) {
    const char *root = getenv("POWERCUT_ROOT");
    size_t length;
    if (root == NULL || path == NULL || getenv("POWERCUT_JOURNAL") == NULL) return NULL;
    if (path[0] == '/') {
        if (strlen(path) >= PATH_MAX) return NULL;
        strcpy(into, path);
    } else {
        char link[64];
        ssize_t got;
        if (folder == AT_FDCWD) {
            if (getcwd(into, PATH_MAX) == NULL) return NULL;
            got = (ssize_t)strlen(into);
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
            got = readlink(link, into, PATH_MAX - 1);
            if (got < 0) return NULL;
        }
        if ((size_t)got + strlen(path) + 2 > PATH_MAX) return NULL;
        into[got] = '/';
        strcpy(into + got + 1, path);
    }
    length = strlen(root);
    return strncmp(into, root, length) == 0 && (into[length] == '/' || into[length] == 0) ? into : NULL;
}

static const char *of_descriptor(int opened, char *into) {
    char link[64];
    ssize_t got;
    const char *root = getenv("POWERCUT_ROOT");
    if (root == NULL || getenv("POWERCUT_JOURNAL") == NULL) return NULL;
    snprintf(link, sizeof link, "/proc/self/fd/%d", opened);
    got = readlink(link, into, PATH_MAX - 1);
    if (got < 0) return NULL;
    into[got] = 0;
    return strncmp(into, root, strlen(root)) == 0 ? into : NULL;
}

/* The whole content of an open file. Reading through the same descriptor where that is possible: closing another one of
 * the file would give up the process's POSIX locks on it. */
static void content(char kind, int opened, const char *path) {
    struct stat status;
    char link[64], *bytes;
    int number = errno, flags = fcntl(opened, F_GETFL), reader = opened;
    size_t done = 0;
    if (flags < 0 || fstat(opened, &status) != 0 || !S_ISREG(status.st_mode)) { errno = number; return; }
    if ((flags & O_ACCMODE) == O_WRONLY) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", opened);
        reader = REAL(open)(link, O_RDONLY | O_CLOEXEC);
    }
    bytes = malloc((size_t)status.st_size + 1);
    while (reader >= 0 && bytes != NULL && done < (size_t)status.st_size) {
        ssize_t got = pread(reader, bytes + done, (size_t)status.st_size - done, (off_t)done);
        if (got <= 0) break;
        done += (size_t)got;
    }
    if (reader >= 0 && reader != opened) REAL(close)(reader);
    if (bytes != NULL) record(kind, status.st_ino, path, NULL, bytes, done);
    free(bytes);
    errno = number;
}

static unsigned long long inode_of(const char *path) {
    struct stat status;
    return lstat(path, &status) == 0 ? status.st_ino : 0;
}

/* --- opening ------------------------------------------------------------------------------------------------------ */

static int opening(const char *name, int folder, const char *path, int flags, mode_t mode, int at) {
    char into[PATH_MAX];
    const char *found = WRITES(flags) ? below(folder, path, into) : NULL;
    int opened, was_there;
    struct stat status;
    if (found == NULL)
        return at ? ((int (*)(int, const char *, int, ...))real(name))(folder, path, flags, mode)
                  : ((int (*)(const char *, int, ...))real(name))(path, flags, mode);
    begin();
    was_there = lstat(found, &status) == 0;
    opened = at ? ((int (*)(int, const char *, int, ...))real(name))(folder, path, flags, mode)
                : ((int (*)(const char *, int, ...))real(name))(path, flags, mode);
    if (opened >= 0 && fstat(opened, &status) == 0 && S_ISREG(status.st_mode)) {
        if (!was_there) record('C', status.st_ino, found, NULL, NULL, 0);
        else if (flags & O_TRUNC) record('W', status.st_ino, NULL, NULL, NULL, 0);
    }
    end();
    return opened;
}

#define MODE(flags, last) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, last); mode = va_arg(more, mode_t); va_end(more); }

int open(const char *path, int flags, ...) { MODE(flags, flags) return opening("open", AT_FDCWD, path, flags, mode, 0); }
int open64(const char *path, int flags, ...) { MODE(flags, flags) return opening("open64", AT_FDCWD, path, flags, mode, 0); }
int openat(int at, const char *path, int flags, ...) { MODE(flags, flags) return opening("openat", at, path, flags, mode, 1); }
int openat64(int at, const char *path, int flags, ...) { MODE(flags, flags) return opening("openat64", at, path, flags, mode, 1); }
int creat(const char *path, mode_t mode) { return opening("open", AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode, 0); }
int creat64(const char *path, mode_t mode) { return opening("open64", AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode, 0); }

static FILE *fopening(const char *name, const char *path, const char *mode) {
    FILE *(*function)(const char *, const char *) = (FILE * (*)(const char *, const char *)) real(name);
    char into[PATH_MAX];
    const char *found = strpbrk(mode, "wa+") ? below(AT_FDCWD, path, into) : NULL;
    struct stat status;
    FILE *opened;
    int was_there;
    if (found == NULL) return function(path, mode);
    begin();
    was_there = lstat(found, &status) == 0;
    opened = function(path, mode);
    if (opened != NULL && fstat(fileno(opened), &status) == 0 && S_ISREG(status.st_mode)) {
        if (!was_there) record('C', status.st_ino, found, NULL, NULL, 0);
        else if (mode[0] == 'w') record('W', status.st_ino, NULL, NULL, NULL, 0);
    }
    end();
    return opened;
}

FILE *fopen(const char *path, const char *mode) { return fopening("fopen", path, mode); }
FILE *fopen64(const char *path, const char *mode) { return fopening("fopen64", path, mode); }

/* --- closing and flushing ----------------------------------------------------------------------------------------- */

static void closing(int opened) {
    char into[PATH_MAX];
    int number = errno, flags = fcntl(opened, F_GETFL);
    if (flags >= 0 && WRITES(flags) && opened != journal && of_descriptor(opened, into) != NULL) {
        begin();
        content('W', opened, into);
        end();
    }
    errno = number;
}

int close(int opened) {
    closing(opened);
    return REAL(close)(opened);
}

int fclose(FILE *opened) {
    fflush(opened);
    closing(fileno(opened));
    return REAL(fclose)(opened);
}

static int flushing(const char *name, int opened) {
    int (*function)(int) = (int (*)(int))real(name);
    char into[PATH_MAX];
    struct stat status;
    int result;
    if (of_descriptor(opened, into) == NULL) return function(opened);
    begin();
    result = 0; /* the disk itself is not waited for */
    if (fstat(opened, &status) == 0 && S_ISDIR(status.st_mode)) record('D', status.st_ino, NULL, NULL, NULL, 0);
    else content('S', opened, into);
    end();
    return result;
}

int fsync(int opened) { return flushing("fsync", opened); }
int fdatasync(int opened) { return flushing("fdatasync", opened); }

/* --- names -------------------------------------------------------------------------------------------------------- */

static int naming(char kind, int from, const char *old, int to, const char *path, int flags) {
    char one[PATH_MAX], two[PATH_MAX];
    const char *first = kind == 'Y' ? old : below(from, old, one), *second = below(to, path, two);
    int result;
    if (second != NULL || (kind == 'R' && first != NULL)) begin();
    else { first = NULL; kind = (char)(kind + 32); }
    switch (kind | 32) {
    case 'r': result = flags ? ((int (*)(int, const char *, int, const char *, unsigned))real("renameat2"))(from, old, to, path, (unsigned)flags)
                             : ((int (*)(int, const char *, int, const char *))real("renameat"))(from, old, to, path); break;
    case 'l': result = ((int (*)(int, const char *, int, const char *, int))real("linkat"))(from, old, to, path, flags); break;
    default: result = ((int (*)(const char *, int, const char *))real("symlinkat"))(old, to, path);
    }
    if (kind >= 'a') return result;
    if (result == 0) {
        if (kind == 'R' && second == NULL) record('U', 0, first, NULL, NULL, 0);
        else if (kind == 'R' && first == NULL) abort(); /* nothing comes in from outside; if so, say so */
        else if (kind == 'R') record('R', 0, first, second, NULL, 0);
        else if (kind == 'L') record('L', inode_of(second), second, NULL, NULL, 0);
        else record('Y', 0, second, first, NULL, 0);
    }
    end();
    return result;
}

int rename(const char *old, const char *path) { return naming('R', AT_FDCWD, old, AT_FDCWD, path, 0); }
int renameat(int from, const char *old, int to, const char *path) { return naming('R', from, old, to, path, 0); }
int renameat2(int from, const char *old, int to, const char *path, unsigned flags) { return naming('R', from, old, to, path, (int)flags); }
int link(const char *old, const char *path) { return naming('L', AT_FDCWD, old, AT_FDCWD, path, 0); }
int linkat(int from, const char *old, int to, const char *path, int flags) { return naming('L', from, old, to, path, flags); }
int symlink(const char *old, const char *path) { return naming('Y', AT_FDCWD, old, AT_FDCWD, path, 0); }
int symlinkat(const char *old, int to, const char *path) { return naming('Y', AT_FDCWD, old, to, path, 0); }

static int unlinking(int at, const char *path, int flags) {
    int (*function)(int, const char *, int) = (int (*)(int, const char *, int))real("unlinkat");
    char into[PATH_MAX];
    const char *found = below(at, path, into);
    int result;
    if (found == NULL) return function(at, path, flags);
    begin();
    result = function(at, path, flags);
    if (result == 0) record(flags & AT_REMOVEDIR ? 'X' : 'U', 0, found, NULL, NULL, 0);
    end();
    return result;
}

int unlink(const char *path) { return unlinking(AT_FDCWD, path, 0); }
int unlinkat(int at, const char *path, int flags) { return unlinking(at, path, flags); }
int rmdir(const char *path) { return unlinking(AT_FDCWD, path, AT_REMOVEDIR); }

static int making(int at, const char *path, mode_t mode) {
    int (*function)(int, const char *, mode_t) = (int (*)(int, const char *, mode_t))real("mkdirat");
    char into[PATH_MAX];
    const char *found = below(at, path, into);
    int result;
    if (found == NULL) return function(at, path, mode);
    begin();
    result = function(at, path, mode);
    if (result == 0) record('M', inode_of(found), found, NULL, NULL, 0);
    end();
    return result;
}

int mkdir(const char *path, mode_t mode) { return making(AT_FDCWD, path, mode); }
int mkdirat(int at, const char *path, mode_t mode) { return making(at, path, mode); }
