/* Counts the calls of MPI in which a rank receives something, and the bytes of their receive buffers (PMPI, preloaded).

MPI_Pcontrol(level) appends a line `level calls bytes` to the file $HPCTRAIN_GROWTH/messages-RANK.
*/
#define _GNU_SOURCE
#include <mpi.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

static atomic_long calls, bytes;

static void received(MPI_Datatype type, long count)
{
    int size = 0;
    PMPI_Type_size(type, &size);
    atomic_fetch_add(&calls, 1);
    atomic_fetch_add(&bytes, size * count);
}

static long total(const int counts[], MPI_Comm comm)
{
    int num_ranks;
    long sum = 0;
    PMPI_Comm_size(comm, &num_ranks);
    for (int rank = 0; rank < num_ranks; rank++)
        sum += counts[rank];
    return sum;
}

static int size_of(MPI_Comm comm)
{
    int num_ranks;
    PMPI_Comm_size(comm, &num_ranks);
    return num_ranks;
}

static int rank_in(MPI_Comm comm)
{
    int rank;
    PMPI_Comm_rank(comm, &rank);
    return rank;
}

int MPI_Allreduce(const void *send, void *receive, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm)
{
    received(type, count);
    return PMPI_Allreduce(send, receive, count, type, op, comm);
}

int MPI_Reduce_scatter(const void *send, void *receive, const int counts[], MPI_Datatype type, MPI_Op op, MPI_Comm comm)
{
    received(type, counts[rank_in(comm)]);
    return PMPI_Reduce_scatter(send, receive, counts, type, op, comm);
}

int MPI_Allgather(const void *send, int sent, MPI_Datatype from, void *receive, int count, MPI_Datatype type, MPI_Comm comm)
{
    received(type, (long)count * size_of(comm));
    return PMPI_Allgather(send, sent, from, receive, count, type, comm);
}

int MPI_Allgatherv(const void *send, int sent, MPI_Datatype from, void *receive, const int counts[], const int starts[],
                   MPI_Datatype type, MPI_Comm comm)
{
    received(type, total(counts, comm));
    return PMPI_Allgatherv(send, sent, from, receive, counts, starts, type, comm);
}

int MPI_Gather(const void *send, int sent, MPI_Datatype from, void *receive, int count, MPI_Datatype type, int root,
               MPI_Comm comm)
{
    if (rank_in(comm) == root)
        received(type, (long)count * size_of(comm));
    return PMPI_Gather(send, sent, from, receive, count, type, root, comm);
}

int MPI_Gatherv(const void *send, int sent, MPI_Datatype from, void *receive, const int counts[], const int starts[],
                MPI_Datatype type, int root, MPI_Comm comm)
{
    if (rank_in(comm) == root)
        received(type, total(counts, comm));
    return PMPI_Gatherv(send, sent, from, receive, counts, starts, type, root, comm);
}

int MPI_Alltoall(const void *send, int sent, MPI_Datatype from, void *receive, int count, MPI_Datatype type, MPI_Comm comm)
{
    received(type, (long)count * size_of(comm));
    return PMPI_Alltoall(send, sent, from, receive, count, type, comm);
}

int MPI_Alltoallv(const void *send, const int sent[], const int from[], MPI_Datatype sent_type, void *receive,
                  const int counts[], const int starts[], MPI_Datatype type, MPI_Comm comm)
{
    received(type, total(counts, comm));
    return PMPI_Alltoallv(send, sent, from, sent_type, receive, counts, starts, type, comm);
}

int MPI_Bcast(void *buffer, int count, MPI_Datatype type, int root, MPI_Comm comm)
{
    if (rank_in(comm) != root)
        received(type, count);
    return PMPI_Bcast(buffer, count, type, root, comm);
}

int MPI_Recv(void *buffer, int count, MPI_Datatype type, int source, int tag, MPI_Comm comm, MPI_Status *status)
{
    received(type, count);
    return PMPI_Recv(buffer, count, type, source, tag, comm, status);
}

int MPI_Irecv(void *buffer, int count, MPI_Datatype type, int source, int tag, MPI_Comm comm, MPI_Request *request)
{
    received(type, count);
    return PMPI_Irecv(buffer, count, type, source, tag, comm, request);
}

int MPI_Pcontrol(const int level, ...)
{
    const char *directory = getenv("HPCTRAIN_GROWTH");
    char *path;
    int rank;
    FILE *file;
    PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (directory == NULL || asprintf(&path, "%s/messages-%d", directory, rank) < 0)
        return MPI_SUCCESS;
    file = fopen(path, "a");
    free(path);
    if (file != NULL) {
        fprintf(file, "%d %ld %ld\n", level, atomic_load(&calls), atomic_load(&bytes));
        fclose(file);
    }
    return MPI_SUCCESS;
}
