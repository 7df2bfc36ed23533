/* Steps of Adam, AdamW and SGD that read each element once: the gradient times a factor, the moments, the parameter. See
   one_pass.py. The formulas are those of PyTorch's fused kernels for CPUs. Each element is computed alone, and products
   and sums are rounded one by one: equal bits on any processor. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>

/* Compiled for several instruction sets; the loader selects the widest that the processor has. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDEST
#endif

WIDEST static void adam_step(float *restrict parameter, const float *restrict gradient, float *restrict mean,
                             float *restrict square, Py_ssize_t numel, float factor, float kept, float added, float to_mean,
                             float of_square, float to_square, float step_size, float correction, float eps)
{
    for (Py_ssize_t i = 0; i < numel; i++) {
        const float slope = gradient[i] * factor + parameter[i] * added;
        const float first = mean[i] + to_mean * (slope - mean[i]);
        const float second = of_square * square[i] + to_square * slope * slope;
        mean[i] = first;
        square[i] = second;
        parameter[i] = parameter[i] * kept - step_size * first / (sqrtf(second) / correction + eps);
    }
}

WIDEST static void sgd_step(float *restrict parameter, const float *restrict gradient, float *restrict velocity,
                            Py_ssize_t numel, float factor, float added, float lr, float of_velocity, float to_velocity,
                            int nesterov)
{
    for (Py_ssize_t i = 0; i < numel; i++) {
        const float slope = gradient[i] * factor + parameter[i] * added;
        const float now = of_velocity * velocity[i] + to_velocity * slope;
        velocity[i] = now;
        parameter[i] -= lr * (nesterov ? slope + of_velocity * now : now);
    }
}

WIDEST static void descend(float *restrict parameter, const float *restrict gradient, Py_ssize_t numel, float factor,
                           float added, float lr)
{
    for (Py_ssize_t i = 0; i < numel; i++)
        parameter[i] -= lr * (gradient[i] * factor + parameter[i] * added);
}

/* Reads a list of `count` numbers per parameter: addresses, and last the number of elements. NULL after an error. */
static Py_ssize_t *read_numbers(PyObject *list, Py_ssize_t count, Py_ssize_t *num_parameters)
{
    const Py_ssize_t size = PyList_GET_SIZE(list);
    if (size % count != 0) {
        PyErr_Format(PyExc_ValueError, "the list has %zd numbers: not %zd for each parameter", size, count);
        return NULL;
    }
    Py_ssize_t *numbers = PyMem_Malloc((size ? size : 1) * sizeof *numbers);
    if (numbers == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < size; i++) {
        numbers[i] = PyLong_AsSsize_t(PyList_GET_ITEM(list, i));
        if (numbers[i] == -1 && PyErr_Occurred()) {
            PyMem_Free(numbers);
            return NULL;
        }
    }
    *num_parameters = size / count;
    return numbers;
}

static PyObject *adam(PyObject *module, PyObject *args)
{
    PyObject *list;
    double factor, lr, beta1, beta2, eps, decay;
    int decoupled;
    Py_ssize_t num_parameters;
    if (!PyArg_ParseTuple(args, "O!ddddddp", &PyList_Type, &list, &factor, &lr, &beta1, &beta2, &eps, &decay, &decoupled))
        return NULL;
    Py_ssize_t *numbers = read_numbers(list, 6, &num_parameters);
    if (numbers == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (const Py_ssize_t *of = numbers; of < numbers + 6 * num_parameters; of += 6) {
        float *step = (float *)of[4];
        *step += 1;
        adam_step((float *)of[0], (const float *)of[1], (float *)of[2], (float *)of[3], of[5], (float)factor,
                  decoupled ? (float)(1 - lr * decay) : 1, decoupled ? 0 : (float)decay, (float)(1 - beta1), (float)beta2,
                  (float)(1 - beta2), (float)(lr / (1 - pow(beta1, *step))), (float)sqrt(1 - pow(beta2, *step)), (float)eps);
    }
    Py_END_ALLOW_THREADS
    PyMem_Free(numbers);
    Py_RETURN_NONE;
}

static PyObject *sgd(PyObject *module, PyObject *args)
{
    PyObject *list;
    double factor, lr, momentum, dampening, decay;
    int nesterov;
    Py_ssize_t num_parameters;
    if (!PyArg_ParseTuple(args, "O!dddddp", &PyList_Type, &list, &factor, &lr, &momentum, &dampening, &decay, &nesterov))
        return NULL;
    Py_ssize_t *numbers = read_numbers(list, 4, &num_parameters);
    if (numbers == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (const Py_ssize_t *of = numbers; of < numbers + 4 * num_parameters; of += 4) {
        if (of[2] == 0) /* without momentum */
            descend((float *)of[0], (const float *)of[1], of[3], (float)factor, (float)decay, (float)lr);
        else
            sgd_step((float *)of[0], (const float *)of[1], (float *)of[2], of[3], (float)factor, (float)decay, (float)lr,
                     (float)momentum, (float)(1 - dampening), nesterov);
    }
    Py_END_ALLOW_THREADS
    PyMem_Free(numbers);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"adam", adam, METH_VARARGS,
     "adam(numbers, factor, lr, beta1, beta2, eps, weight_decay, decoupled): numbers are, for each parameter, the addresses "
     "of parameter, gradient, exp_avg, exp_avg_sq and step, and the number of elements; all float32."},
    {"sgd", sgd, METH_VARARGS,
     "sgd(numbers, factor, lr, momentum, dampening, weight_decay, nesterov): numbers are, for each parameter, the addresses "
     "of parameter, gradient and momentum buffer (0 without momentum), and the number of elements; all float32."},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module)
{
    return PyModule_AddIntConstant(module, "VERSION", 1); /* as in one_pass.py, which rejects other versions */
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_one_pass", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__one_pass(void)
{
    return PyModuleDef_Init(&definition);
}
