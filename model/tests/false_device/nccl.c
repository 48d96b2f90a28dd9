/* An NCCL for ranks that are threads of one process and whose devices are the host's memory (cuda.c): a call goes
 * through once every rank has made it. Elements are f32, their sums are made in the order of the ranks. What a test
 * wants of it is in the environment: calls from the FALSE_NCCL_FAIL_FROMth on fail; each abort adds a line to the file
 * FALSE_NCCL_LOG. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, REMOTE_ERROR = 6, IN_PROGRESS = 7, RANKS = 8 };
enum Kind { JOIN, REDUCE, SCATTER, GATHER, BROADCAST, MESSAGE, FINISH };
typedef struct { char bytes[128]; } Id;
typedef struct {
    enum Kind kind;
    const float *from;
    float *to;
    size_t count;
    int root;
} Call;
typedef struct Group {
    struct Group *next;
    Id id;
    int size, waiting;
    Call calls[RANKS];
    unsigned long begun[RANKS], done;
} Group;
typedef struct { Group *group; int rank; } Comm;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Group *groups;
static long ids, calls;

static void carry_out(Group *group) {
    for (int rank = 0; rank < group->size; rank++) {
        Call *own = &group->calls[rank];
        for (size_t i = 0; i < own->count; i++) {
            switch (own->kind) {
            case REDUCE:
            case SCATTER:
                break;
            case GATHER:
                for (int other = 0; other < group->size; other++)
                    own->to[other * own->count + i] = group->calls[other].from[i];
                break;
            case BROADCAST:
                if (rank != own->root) own->to[i] = group->calls[own->root].from[i];
                break;
            case MESSAGE:
                if (own->to) own->to[i] = group->calls[1 - rank].from[i];
                break;
            default:
                break;
            }
        }
    }
    if (group->calls[0].kind != REDUCE && group->calls[0].kind != SCATTER) return;
    /* Sums may be made in place: all are made before any is put down. */
    size_t count = group->calls[0].count;
    size_t whole = group->calls[0].kind == SCATTER ? count * group->size : count;
    float *sums = calloc(whole, sizeof *sums);
    for (int rank = 0; rank < group->size; rank++)
        for (size_t i = 0; i < whole; i++) sums[i] += group->calls[rank].from[i];
    for (int rank = 0; rank < group->size; rank++) {
        size_t start = group->calls[0].kind == SCATTER ? count * rank : 0;
        memcpy(group->calls[rank].to, sums + start, count * sizeof *sums);
    }
    free(sums);
}

static int call(Comm *comm, Call what) {
    const char *fail = getenv("FALSE_NCCL_FAIL_FROM");
    pthread_mutex_lock(&lock);
    Group *group = comm->group;
    int fails = what.kind != JOIN && what.kind != FINISH && fail && ++calls >= atol(fail);
    group->calls[comm->rank] = what;
    group->begun[comm->rank]++;
    int same = 1;
    for (int rank = 0; rank < group->size; rank++) same &= group->calls[rank].kind == what.kind;
    /* Ranks that call different things wait for ever. */
    if (++group->waiting == group->size && same) {
        carry_out(group);
        group->waiting = 0;
        group->done++;
    }
    pthread_mutex_unlock(&lock);
    return fails ? REMOTE_ERROR : IN_PROGRESS;
}

int ncclGetVersion(int *version) { *version = 22809; return SUCCESS; }
int ncclGetUniqueId(Id *id) {
    pthread_mutex_lock(&lock);
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "%ld", ++ids);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
int ncclCommInitRankConfig(Comm **comm, int size, Id id, int rank, int *config) {
    /* size, magic, version, and that it does not block */
    if (config[2] != (int)0xcafebeef || config[4] != 0 || size > RANKS) return 4;
    pthread_mutex_lock(&lock);
    Group *group = groups;
    while (group && memcmp(&group->id, &id, sizeof id)) group = group->next;
    if (!group) {
        group = calloc(1, sizeof *group);
        *group = (Group){.next = groups, .id = id, .size = size};
        groups = group;
    }
    pthread_mutex_unlock(&lock);
    *comm = calloc(1, sizeof **comm);
    **comm = (Comm){group, rank};
    return call(*comm, (Call){JOIN});
}
int ncclCommGetAsyncError(Comm *comm, int *state) {
    pthread_mutex_lock(&lock);
    *state = comm->group->begun[comm->rank] > comm->group->done ? IN_PROGRESS : SUCCESS;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
int ncclCommFinalize(Comm *comm) { return call(comm, (Call){FINISH}); }
int ncclCommDestroy(Comm *comm) { free(comm); return SUCCESS; }
int ncclCommAbort(Comm *comm) {
    const char *name = getenv("FALSE_NCCL_LOG");
    FILE *log = name ? fopen(name, "a") : NULL;
    if (log) {
        fprintf(log, "abort %d\n", comm->rank);
        fclose(log);
    }
    return SUCCESS;
}
const char *ncclGetErrorString(int answer) { return answer == REMOTE_ERROR ? "a false error" : "no error"; }
const char *ncclGetLastError(Comm *comm) { return "said last"; }
int ncclAllReduce(float *from, float *to, size_t count, int kind, int sum, Comm *comm, void *stream) {
    return call(comm, (Call){REDUCE, from, to, count});
}
int ncclReduceScatter(float *from, float *to, size_t count, int kind, int sum, Comm *comm, void *stream) {
    return call(comm, (Call){SCATTER, from, to, count});
}
int ncclAllGather(float *from, float *to, size_t count, int kind, Comm *comm, void *stream) {
    return call(comm, (Call){GATHER, from, to, count});
}
int ncclBroadcast(float *from, float *to, size_t count, int kind, int root, Comm *comm, void *stream) {
    return call(comm, (Call){BROADCAST, from, to, count, root});
}
int ncclSend(float *from, size_t count, int kind, int to, Comm *comm, void *stream) {
    return call(comm, (Call){MESSAGE, from, NULL, count});
}
int ncclRecv(float *to, size_t count, int kind, int from, Comm *comm, void *stream) {
    return call(comm, (Call){MESSAGE, NULL, to, count});
}
