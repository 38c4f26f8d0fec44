/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 * What a translated socket originally asked for: written by sock_lb, read by tcp_signals.
 */
#ifndef MODALMESH_MAPS_ORIGIN_H
#define MODALMESH_MAPS_ORIGIN_H

#include "maps.h"

MM_SOCKET_MAP(socket_origin, struct socket_origin);

#endif
