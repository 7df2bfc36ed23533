/* Sums of the buckets of a node's ranks in one pass over memory, and the claiming of pieces by ranks. See summation.py and
   all_reduce_reducer.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define TILE 1024 /* elements that are summed in the first-level cache before they are written */
#define LANES 16  /* number of partial sums of squares, in an order that no compiler may change: equal bits on any processor */

/* Compiled for several instruction sets; the loader selects the widest that the processor has. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDEST
#endif

#define DEFINE_ADD(NAME, TYPE)                                                                                \
    WIDEST static double NAME(const Py_buffer *parts, Py_ssize_t num_parts, const Py_buffer *into,            \
                              Py_ssize_t num_into, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t num_squared,  \
                              double factor)                                                                  \
    {                                                                                                         \
        double lanes[LANES] = {0}, square = 0;                                                                \
        const TYPE by = (TYPE)factor;                                                                         \
        TYPE tile[TILE];                                                                                      \
        for (; begin < end; begin += TILE) {                                                                  \
            const Py_ssize_t size = end - begin < TILE ? end - begin : TILE;                                  \
            const Py_ssize_t left = num_squared - begin;                                                      \
            const Py_ssize_t squared = left < 0 ? 0 : left < size ? left : size;                              \
            const TYPE *first = (const TYPE *)parts[0].buf + begin;                                           \
            if (num_parts == 1) {                                                                             \
                memcpy(tile, first, size * sizeof(TYPE));                                                     \
            } else {                                                                                          \
                const TYPE *second = (const TYPE *)parts[1].buf + begin;                                      \
                for (Py_ssize_t i = 0; i < size; i++)                                                         \
                    tile[i] = first[i] + second[i];                                                           \
            }                                                                                                 \
            for (Py_ssize_t part = 2; part < num_parts; part++) {                                             \
                const TYPE *other = (const TYPE *)parts[part].buf + begin;                                    \
                for (Py_ssize_t i = 0; i < size; i++)                                                         \
                    tile[i] += other[i];                                                                      \
            }                                                                                                 \
            if (by != 1)                                                                                      \
                for (Py_ssize_t i = 0; i < size; i++)                                                         \
                    tile[i] *= by;                                                                            \
            Py_ssize_t i = 0;                                                                                 \
            for (; i + LANES <= squared; i += LANES)                                                          \
                for (int lane = 0; lane < LANES; lane++)                                                      \
                    lanes[lane] += (double)tile[i + lane] * (double)tile[i + lane];                           \
            for (; i < squared; i++)                                                                          \
                lanes[i % LANES] += (double)tile[i] * (double)tile[i];                                        \
            for (Py_ssize_t copy = 0; copy < num_into; copy++)                                                \
                memcpy((TYPE *)into[copy].buf + begin, tile, size * sizeof(TYPE));                            \
        }                                                                                                     \
        for (int lane = 0; lane < LANES; lane++)                                                              \
            square += lanes[lane];                                                                            \
        return square;                                                                                        \
    }

DEFINE_ADD(add_float, float)
DEFINE_ADD(add_double, double)

/* True if all have the same shape (n,), and all are float32 or all are float64. */
static int alike(const Py_buffer *views, Py_ssize_t count)
{
    const char *format = views[0].format;
    if (strcmp(format, "f") != 0 && strcmp(format, "d") != 0)
        return 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if (views[i].ndim != 1 || views[i].len != views[0].len || strcmp(views[i].format, format) != 0)
            return 0;
    return 1;
}

static void release(Py_buffer *views, Py_ssize_t count)
{
    while (count > 0)
        PyBuffer_Release(&views[--count]);
    PyMem_Free(views);
}

static PyObject *add(PyObject *module, PyObject *args)
{
    PyObject *parts, *into, *result = NULL;
    Py_ssize_t num_squared, count = 0;
    double factor;
    if (!PyArg_ParseTuple(args, "O!O!nd", &PyTuple_Type, &parts, &PyTuple_Type, &into, &num_squared, &factor))
        return NULL;
    const Py_ssize_t num_parts = PyTuple_GET_SIZE(parts), num_into = PyTuple_GET_SIZE(into);
    Py_buffer *views = PyMem_Calloc(num_parts + num_into, sizeof *views);
    if (views == NULL)
        return PyErr_NoMemory();
    for (; count < num_parts + num_into; count++) {
        PyObject *array = count < num_parts ? PyTuple_GET_ITEM(parts, count) : PyTuple_GET_ITEM(into, count - num_parts);
        const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (count < num_parts ? 0 : PyBUF_WRITABLE);
        if (PyObject_GetBuffer(array, &views[count], flags) != 0)
            goto done;
    }
    if (num_parts == 0 || !alike(views, count)) {
        PyErr_SetString(PyExc_ValueError, "add takes arrays of shape (n,), all of float32 or all of float64, and at least one part");
        goto done;
    }
    const Py_ssize_t numel = views[0].len / views[0].itemsize;
    const int is_float = views[0].format[0] == 'f';
    if (num_squared < 0)
        num_squared = 0;
    double square;
    Py_BEGIN_ALLOW_THREADS
    square = (is_float ? add_float : add_double)(views, num_parts, views + num_parts, num_into, 0, numel,
                                                  num_squared, factor);
    Py_END_ALLOW_THREADS
    result = PyFloat_FromDouble(square);
done:
    release(views, count);
    return result;
}

/* Indices of a rank's flags, one cache line apart, as in shared_buckets.py; results of take(), as in all_reduce_reducer.py. */
enum { FILLED = 0, SUMMED = 8, NUM_FLAGS = 16 };
enum { WAITS = 0, GOT_ON = 1, ENDED = 2 };

static int is_array_of(const Py_buffer *view, const char *formats, Py_ssize_t least)
{
    return view->ndim == 1 && view->itemsize == 8 && strlen(view->format) == 1 && strchr(formats, view->format[0]) != NULL &&
           view->len >= 8 * least && (uintptr_t)view->buf % 8 == 0;
}

static PyObject *fill(PyObject *module, PyObject *args)
{
    PyObject *flags;
    Py_buffer view;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "On", &flags, &count) ||
        PyObject_GetBuffer(flags, &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE) != 0)
        return NULL;
    const int valid = is_array_of(&view, "lq", NUM_FLAGS);
    if (valid)
        __atomic_store_n((int64_t *)view.buf + FILLED, count, __ATOMIC_RELEASE);
    else
        PyErr_SetString(PyExc_ValueError, "fill takes flags of int64, shape (16,)");
    PyBuffer_Release(&view);
    return valid ? Py_NewRef(Py_None) : NULL;
}

static PyObject *take(PyObject *module, PyObject *args)
{
    PyObject *parts, *flags, *claimed, *squares, *result = NULL;
    Py_ssize_t local, before, piece_elems, num_squared, count = 0;
    double factor;
    if (!PyArg_ParseTuple(args, "O!O!OOnnnnd", &PyTuple_Type, &parts, &PyTuple_Type, &flags, &claimed, &squares, &local,
                          &before, &piece_elems, &num_squared, &factor))
        return NULL;
    const Py_ssize_t ranks = PyTuple_GET_SIZE(parts);
    if (ranks == 0 || PyTuple_GET_SIZE(flags) != ranks || local < 0 || local >= ranks || before < 0 || piece_elems < 1) {
        PyErr_SetString(PyExc_ValueError, "take takes as many flags as parts, at least one, and counts that are not below 0");
        return NULL;
    }
    Py_buffer *views = PyMem_Calloc(2 * ranks + 2, sizeof *views);
    if (views == NULL)
        return PyErr_NoMemory();
    for (; count < 2 * ranks + 2; count++) {
        PyObject *array = count < ranks       ? PyTuple_GET_ITEM(parts, count)
                          : count < 2 * ranks ? PyTuple_GET_ITEM(flags, count - ranks)
                          : count == 2 * ranks ? claimed
                                               : squares;
        if (PyObject_GetBuffer(array, &views[count], PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE) != 0)
            goto done;
    }
    int valid = alike(views, ranks);
    for (Py_ssize_t rank = 0; rank < ranks; rank++)
        valid = valid && is_array_of(&views[ranks + rank], "lq", NUM_FLAGS);
    const Py_ssize_t numel = valid ? views[0].len / views[0].itemsize : 0;
    const Py_ssize_t num_pieces = (numel + piece_elems - 1) / piece_elems, end = before + num_pieces;
    if (!valid || !is_array_of(&views[2 * ranks], "lq", 1) || !is_array_of(&views[2 * ranks + 1], "d", num_pieces)) {
        PyErr_SetString(PyExc_ValueError, "take takes parts of shape (n,), all of float32 or all of float64, flags of "
                                          "int64, shape (16,), a count, int64, and as many squares, float64, as pieces");
        goto done;
    }
    const int is_float = views[0].format[0] == 'f';
    int64_t *next = views[2 * ranks].buf;
    double *table = views[2 * ranks + 1].buf;
    long state = WAITS;
    Py_BEGIN_ALLOW_THREADS
    for (;;) {
        int64_t piece = __atomic_load_n(next, __ATOMIC_ACQUIRE), filled = end, summed = 0;
        for (Py_ssize_t rank = 0; rank < ranks; rank++) {
            const int64_t by = __atomic_load_n((int64_t *)views[ranks + rank].buf + FILLED, __ATOMIC_ACQUIRE);
            filled = by < filled ? by : filled;
        }
        if (before <= piece && piece < filled) {
            if (!__atomic_compare_exchange_n(next, &piece, piece + 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
                continue; /* another rank was first */
            const Py_ssize_t first = (piece - before) * piece_elems;
            const Py_ssize_t last = numel - first < piece_elems ? numel : first + piece_elems;
            const Py_ssize_t written = ranks > 1 || factor != 1 ? ranks : 0;
            table[piece - before] = (is_float ? add_float : add_double)(views, ranks, views, written, first, last, num_squared,
                                                                        factor);
            __atomic_fetch_add((int64_t *)views[ranks + local].buf + SUMMED, 1, __ATOMIC_RELEASE);
            state = GOT_ON;
            continue;
        }
        for (Py_ssize_t rank = 0; rank < ranks; rank++)
            summed += __atomic_load_n((int64_t *)views[ranks + rank].buf + SUMMED, __ATOMIC_ACQUIRE);
        if (summed >= end)
            state = ENDED;
        break;
    }
    Py_END_ALLOW_THREADS
    result = PyLong_FromLong(state);
done:
    release(views, count);
    return result;
}

static PyMethodDef methods[] = {
    {"add", add, METH_VARARGS, "add(parts, into, num_squared, factor): see hpctrain.reduce.shared_memory.summation."},
    {"fill", fill, METH_VARARGS, "fill(flags, count): publishes the elements written before; see hpctrain.reduce.shared_memory.all_reduce_reducer."},
    {"take", take, METH_VARARGS, "take(parts, flags, claimed, squares, local, before, piece_elems, num_squared, factor): see hpctrain.reduce.shared_memory.all_reduce_reducer."},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module)
{
    return PyModule_AddIntConstant(module, "VERSION", 2); /* as in summation.py, which rejects other versions */
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_add", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__add(void)
{
    return PyModuleDef_Init(&definition);
}
